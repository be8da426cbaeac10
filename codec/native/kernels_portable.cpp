#include "kernels.hpp"
#include "processor.hpp"

namespace weightcast {
namespace portable {
namespace {

template <class T>
void diff(const void* a, const void* b, size_t count, uint64_t* masks) {
    const T *x = (const T*)a, *y = (const T*)b;
    for (size_t i = 0; i < count; i += 64, masks++) {
        const size_t here = count - i < 64 ? count - i : 64;
        *masks = 0;
        if (std::memcmp(x + i, y + i, here * sizeof(T)) == 0) continue;
        for (size_t j = 0; j < here; j++) *masks |= (uint64_t)(x[i + j] != y[i + j]) << j;
    }
}

template <class T>
void scan(const void* before, const void* after, size_t count, const HazardTable& hazards, Scan& out) {
    const T* w = (const T*)before;
    const int shift = hazards.field.mantissa_bits;
    out.dirty = 0;
    if (after) {
        diff<T>(before, after, count, out.masks);
        for (size_t j = 0; j < (count + 63) / 64; j++) out.dirty |= (uint64_t)(out.masks[j] != 0) << j;
    }
    out.blocks = (count + kBlock - 1) / kBlock;
    for (size_t i = 0; i < count; i++) out.classes[i] = hazards.class_of_key[w[i] >> shift];
    std::memset(out.classes + count, 0, out.blocks * kBlock - count);
    for (size_t group = 0; group < out.blocks * (kBlock / 8); group++) {
        uint32_t* sums = out.sums[group / 32].sum + group % 32;
        if (group % 32 == 0) sums[0] = 0;
        const uint8_t* classes = out.classes + 8 * group;
        uint32_t sum = 0;
        if (8 * group + 8 <= count)  // of constant length, so that it is unrolled; few groups are cut short
            for (size_t i = 0; i < 8; i++) sum += hazards.by_class[classes[i]];
        else
            for (size_t i = 8 * group; i < count; i++) sum += hazards.by_class[out.classes[i]];
        sums[1] = sums[0] + sum;
    }
}

WC_INLINE size_t groups_at_most(const uint32_t sums[32], uint32_t target) {
    size_t n = 0;
    for (size_t half = 16; half; half >>= 1) n += sums[n + half - 1] <= target ? half : 0;
    return n;
}

struct Lookup {
    const uint32_t* by_class;
};

WC_INLINE Lookup make_lookup(const HazardTable& t) { return {t.by_class}; }

#include "edges.inl"
#include "lanes.inl"

template <class T>
constexpr Kernels kSet = {scan<T>, diff<T>, encode_lane, decode_lanes};

}  // namespace
}  // namespace portable

const Kernels& portable_kernels(int width) {
    return width == 1 ? portable::kSet<uint8_t> : width == 2 ? portable::kSet<uint16_t> : portable::kSet<uint32_t>;
}

const Kernels& kernels(int width, bool portable) {
#if defined(WEIGHTCAST_AVX2)
    if (has_avx2() && !portable) return avx2_kernels(width);
#elif defined(WEIGHTCAST_NEON)
    if (!portable) return neon_kernels(width);  // every 64-bit ARM processor has it
#endif
    (void)portable;
    return portable_kernels(width);
}

}  // namespace weightcast
