// For 64-bit ARM, little-endian, where NEON is always there.
#include <arm_neon.h>

#include "kernels.hpp"

namespace weightcast {
namespace neon {
namespace {

// The classes' hazards. An event looks 8 of them up in turn: three shuffles, their bytes put together and a prefix sum
// take longer until the last edge is known, which the next event waits for. The scan waits for nothing and shuffles.
struct Lookup {
    const uint32_t* by_class;
    uint8x16_t plane[3];  // byte by byte
};

WC_INLINE Lookup make_lookup(const HazardTable& t) {
    return {t.by_class, {vld1q_u8(t.plane[0]), vld1q_u8(t.plane[1]), vld1q_u8(t.plane[2])}};
}

// How exponents become classes.
struct Classifier {
    uint8x16_t lowest, exponent_mask;
    int right;  // negative: how far to shift
};

WC_INLINE Classifier make_classifier(const HazardTable& t, int) {
    return {vdupq_n_u8(t.lowest), vdupq_n_u8((uint8_t)((1 << t.field.exponent_bits) - 1)), -t.field.mantissa_bits};
}

// The low bytes of 16 numbers, in order.
WC_INLINE uint8x16_t low_bytes(uint16x8_t a, uint16x8_t b) {
    return vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
}

WC_INLINE uint8x16_t low_bytes(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
    return low_bytes(vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)),
                     vuzp1q_u16(vreinterpretq_u16_u32(c), vreinterpretq_u16_u32(d)));
}

// The low bytes of 16 weights shifted to the right, in order. Bits above the exponent may be left in them.
WC_INLINE uint8x16_t shifted(const uint8_t* w, int right) { return vshlq_u8(vld1q_u8(w), vdupq_n_s8((int8_t)right)); }

WC_INLINE uint8x16_t shifted(const uint16_t* w, int right) {
    const int16x8_t by = vdupq_n_s16((int16_t)right);
    return low_bytes(vshlq_u16(vld1q_u16(w), by), vshlq_u16(vld1q_u16(w + 8), by));
}

WC_INLINE uint8x16_t shifted(const uint32_t* w, int right) {
    const int32x4_t by = vdupq_n_s32(right);
    return low_bytes(vshlq_u32(vld1q_u32(w), by), vshlq_u32(vld1q_u32(w + 4), by), vshlq_u32(vld1q_u32(w + 8), by),
                     vshlq_u32(vld1q_u32(w + 12), by));
}

// Stores the classes of 16 weights.
template <class T>
WC_INLINE uint8x16_t classify(const T* w, const Classifier& by, uint8_t* classes) {
    const uint8x16_t exponents = vandq_u8(shifted(w, by.right), by.exponent_mask);
    const uint8x16_t c = vminq_u8(vqsubq_u8(exponents, by.lowest), vdupq_n_u8(kClasses - 1));
    vst1q_u8(classes, c);
    return c;
}

// Sums of four groups of 8 bytes.
WC_INLINE uint32x4_t sums_of_8(uint8x16_t a, uint8x16_t b) {
    return vpaddlq_u16(vpaddq_u16(vpaddlq_u8(a), vpaddlq_u8(b)));
}

WC_INLINE uint32x4_t prefix_sums(uint32x4_t x) {
    const uint32x4_t zero = vdupq_n_u32(0);
    x = vaddq_u32(x, vextq_u32(zero, x, 3));
    return vaddq_u32(x, vextq_u32(zero, x, 2));
}

template <class T>
WC_INLINE void scan_block(const T* w, const Classifier& by, const Lookup& k, BlockSums& out, uint8_t* classes) {
    uint32x4_t before = vdupq_n_u32(0);
    out.sum[0] = 0;
    for (size_t i = 0; i < kBlock; i += 32) {
        const uint8x16_t a = classify(w + i, by, classes + i), b = classify(w + i + 16, by, classes + i + 16);
        // Byte plane by byte plane.
        uint32x4_t sums = sums_of_8(vqtbl1q_u8(k.plane[0], a), vqtbl1q_u8(k.plane[0], b));
        for (int byte = 1; byte < 3; byte++) {
            const uint32x4_t plane = sums_of_8(vqtbl1q_u8(k.plane[byte], a), vqtbl1q_u8(k.plane[byte], b));
            sums = vaddq_u32(sums, vshlq_u32(plane, vdupq_n_s32(8 * byte)));
        }
        sums = vaddq_u32(prefix_sums(sums), before);
        vst1q_u32(out.sum + 1 + i / 8, sums);
        before = vdupq_laneq_u32(sums, 3);
    }
}

// Of 16 weights: all bits set where they are the same.
WC_INLINE uint8x16_t equal16(const uint8_t* a, const uint8_t* b) { return vceqq_u8(vld1q_u8(a), vld1q_u8(b)); }

WC_INLINE uint8x16_t equal16(const uint16_t* a, const uint16_t* b) {
    return low_bytes(vceqq_u16(vld1q_u16(a), vld1q_u16(b)), vceqq_u16(vld1q_u16(a + 8), vld1q_u16(b + 8)));
}

WC_INLINE uint8x16_t equal16(const uint32_t* a, const uint32_t* b) {
    return low_bytes(vceqq_u32(vld1q_u32(a), vld1q_u32(b)), vceqq_u32(vld1q_u32(a + 4), vld1q_u32(b + 4)),
                     vceqq_u32(vld1q_u32(a + 8), vld1q_u32(b + 8)), vceqq_u32(vld1q_u32(a + 12), vld1q_u32(b + 12)));
}

template <class T>
WC_INLINE uint64_t equal64(const T* a, const T* b) {
    // Each byte keeps one bit of its own; adding neighbours three times packs eight bytes into one.
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    uint8x16_t x[4];
    for (int i = 0; i < 4; i++) x[i] = vandq_u8(equal16(a + 16 * i, b + 16 * i), bit);
    const uint8x16_t quarters = vpaddq_u8(vpaddq_u8(x[0], x[1]), vpaddq_u8(x[2], x[3]));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(quarters, quarters)), 0);
}

WC_INLINE size_t groups_at_most(const uint32_t sums[32], uint32_t target) {
    const uint32x4_t t = vdupq_n_u32(target);
    uint32x4_t n[8];  // -1 for each
    for (int i = 0; i < 8; i++) n[i] = vcgeq_u32(t, vld1q_u32(sums + 4 * i));
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) n[i] = vaddq_u32(n[i], n[i + half]);
    return 0u - vaddvq_u32(n[0]);
}

#include "edges.inl"
#include "lanes.inl"
#include "scan.inl"

template <class T>
constexpr Kernels kSet = {scan<T>, diff<T>, encode_lane, decode_lanes};

}  // namespace
}  // namespace neon

const Kernels& neon_kernels(int width) {
    return width == 1 ? neon::kSet<uint8_t> : width == 2 ? neon::kSet<uint16_t> : neon::kSet<uint32_t>;
}

}  // namespace weightcast
