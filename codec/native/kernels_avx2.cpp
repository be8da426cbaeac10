// Compiled with AVX2, BMI2 and POPCNT; reached only through avx2_kernels() on a processor that has them.
#include <immintrin.h>

#include "kernels.hpp"

namespace weightcast {
namespace avx2 {
namespace {

WC_INLINE __m256i load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

// 16 bytes from p in the lower half, 16 bytes from q in the upper.
WC_INLINE __m256i load_halves(const void* p, const void* q) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p)),
                                   _mm_loadu_si128((const __m128i*)q), 1);
}

// The bytes of the classes' hazards, for shuffles by class; the same 16 in both halves.
struct Lookup {
    __m256i plane[3];
};

WC_INLINE Lookup make_lookup(const HazardTable& t) {
    Lookup k;
    for (int byte = 0; byte < 3; byte++)
        k.plane[byte] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)t.plane[byte]));
    return k;
}

// How exponents become classes.
struct Classifier {
    __m256i lowest, exponent_mask;
    __m128i shift;
};

WC_INLINE Classifier make_classifier(const HazardTable& t, int width) {
    const int mask = (1 << t.field.exponent_bits) - 1;
    const __m256i masks = width == 1   ? _mm256_set1_epi8((char)mask)
                          : width == 2 ? _mm256_set1_epi16((short)mask)
                                       : _mm256_set1_epi32(mask);
    return {_mm256_set1_epi8((char)t.lowest), masks, _mm_cvtsi32_si128(t.field.mantissa_bits)};
}

// The exponents of 32 weights as bytes, in order.
WC_INLINE __m256i exponents(const uint8_t* w, const Classifier& k) {
    return _mm256_and_si256(_mm256_srl_epi16(load(w), k.shift), k.exponent_mask);
}

WC_INLINE __m256i exponents(const uint16_t* w, const Classifier& k) {
    const __m256i a = load_halves(w, w + 16), b = load_halves(w + 8, w + 24);
    return _mm256_packus_epi16(_mm256_and_si256(_mm256_srl_epi16(a, k.shift), k.exponent_mask),
                               _mm256_and_si256(_mm256_srl_epi16(b, k.shift), k.exponent_mask));
}

WC_INLINE __m256i exponents(const uint32_t* w, const Classifier& k) {
    __m256i e[4];
    for (int i = 0; i < 4; i++)
        e[i] = _mm256_and_si256(_mm256_srl_epi32(load_halves(w + 4 * i, w + 4 * i + 16), k.shift), k.exponent_mask);
    return _mm256_packus_epi16(_mm256_packus_epi32(e[0], e[1]), _mm256_packus_epi32(e[2], e[3]));
}

// Hazard sums of four groups of 8 weights, as 64-bit numbers: byte plane by byte plane. Stores the 32 classes.
template <class T>
WC_INLINE __m256i group_sums(const T* w, const Classifier& by, const Lookup& k, uint8_t* classes) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i c = _mm256_min_epu8(_mm256_subs_epu8(exponents(w, by), by.lowest), _mm256_set1_epi8(kClasses - 1));
    _mm256_storeu_si256((__m256i*)classes, c);
    const __m256i low = _mm256_sad_epu8(_mm256_shuffle_epi8(k.plane[0], c), zero);
    const __m256i middle = _mm256_sad_epu8(_mm256_shuffle_epi8(k.plane[1], c), zero);
    const __m256i high = _mm256_sad_epu8(_mm256_shuffle_epi8(k.plane[2], c), zero);
    return _mm256_add_epi64(low, _mm256_add_epi64(_mm256_slli_epi64(middle, 8), _mm256_slli_epi64(high, 16)));
}

// Prefix sums of the groups of 64 weights, within each half of the register: 0-3 and 4-7.
template <class T>
WC_INLINE __m256i half_prefixes(const T* w, const Classifier& by, const Lookup& k, uint8_t* classes) {
    const __m256i a = group_sums(w, by, k, classes), b = group_sums(w + 32, by, k, classes + 32);
    __m256i x = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0x88));
    x = _mm256_permute4x64_epi64(x, 0xD8);
    x = _mm256_add_epi32(x, _mm256_slli_si256(x, 4));
    return _mm256_add_epi32(x, _mm256_slli_si256(x, 8));
}

template <class T>
WC_INLINE void scan_block(const T* w, const Classifier& by, const Lookup& k, BlockSums& out, uint8_t* classes) {
    __m256i x[4];
    for (int i = 0; i < 4; i++) x[i] = half_prefixes(w + 64 * i, by, k, classes + 64 * i);
    // The totals of the eight halves, in order, then what lies before each half.
    __m256i t = _mm256_unpackhi_epi64(_mm256_unpackhi_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[2], x[3]));
    t = _mm256_permutevar8x32_epi32(t, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    t = _mm256_add_epi32(t, _mm256_slli_si256(t, 4));
    t = _mm256_add_epi32(t, _mm256_slli_si256(t, 8));
    const __m256i carry = _mm256_permutevar8x32_epi32(t, _mm256_set1_epi32(3));
    t = _mm256_add_epi32(t, _mm256_blend_epi32(_mm256_setzero_si256(), carry, 0xF0));
    __m256i before = _mm256_permutevar8x32_epi32(t, _mm256_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6));
    before = _mm256_blend_epi32(before, _mm256_setzero_si256(), 1);
    out.sum[0] = 0;
    for (int i = 0; i < 4; i++) {
        const __m256i halves = _mm256_add_epi32(_mm256_set1_epi32(2 * i), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
        const __m256i sums = _mm256_add_epi32(x[i], _mm256_permutevar8x32_epi32(before, halves));
        _mm256_storeu_si256((__m256i*)(out.sum + 1 + 8 * i), sums);
    }
}

WC_INLINE uint64_t equal64(const uint8_t* a, const uint8_t* b) {
    const uint32_t low = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(load(a), load(b)));
    const uint32_t high = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(load(a + 32), load(b + 32)));
    return (uint64_t)high << 32 | low;
}

WC_INLINE uint32_t equal32(const uint16_t* a, const uint16_t* b) {
    const __m256i x = _mm256_cmpeq_epi16(load(a), load(b)), y = _mm256_cmpeq_epi16(load(a + 16), load(b + 16));
    return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(x, y), 0xD8));
}

WC_INLINE uint64_t equal64(const uint16_t* a, const uint16_t* b) {
    return (uint64_t)equal32(a + 32, b + 32) << 32 | equal32(a, b);
}

WC_INLINE uint64_t equal64(const uint32_t* a, const uint32_t* b) {
    uint64_t mask = 0;
    for (int i = 0; i < 8; i++) {
        const __m256i e = _mm256_cmpeq_epi32(load(a + 8 * i), load(b + 8 * i));
        mask |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(e)) << (8 * i);
    }
    return mask;
}

WC_INLINE size_t groups_at_most(const uint32_t sums[32], uint32_t target) {
    // Signed comparison: sums and target are below 2^31.
    const __m256i t = _mm256_set1_epi32((int)target);
    const __m256i a = _mm256_packs_epi32(_mm256_cmpgt_epi32(load(sums), t), _mm256_cmpgt_epi32(load(sums + 8), t));
    const __m256i b =
        _mm256_packs_epi32(_mm256_cmpgt_epi32(load(sums + 16), t), _mm256_cmpgt_epi32(load(sums + 24), t));
    return 32 - (size_t)__builtin_popcount((uint32_t)_mm256_movemask_epi8(_mm256_packs_epi16(a, b)));
}

WC_INLINE __m256i edges_above(const uint8_t* classes, const Lookup& k, uint32_t low) {
    const __m128i c = _mm_loadl_epi64((const __m128i*)classes);
    const __m128i b0 = _mm_shuffle_epi8(_mm256_castsi256_si128(k.plane[0]), c);
    const __m128i b1 = _mm_shuffle_epi8(_mm256_castsi256_si128(k.plane[1]), c);
    const __m128i b2 = _mm_shuffle_epi8(_mm256_castsi256_si128(k.plane[2]), c);
    const __m128i b01 = _mm_unpacklo_epi8(b0, b1), b23 = _mm_unpacklo_epi8(b2, _mm_setzero_si128());
    __m256i x =
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(b01, b23)), _mm_unpackhi_epi16(b01, b23), 1);
    x = _mm256_add_epi32(x, _mm256_slli_si256(x, 4));
    x = _mm256_add_epi32(x, _mm256_slli_si256(x, 8));
    const __m256i first_half = _mm256_shuffle_epi32(_mm256_permute2x128_si256(x, x, 0x08), 0xFF);
    return _mm256_add_epi32(_mm256_add_epi32(x, first_half), _mm256_set1_epi32((int)low));
}

WC_INLINE void group_edges(const uint8_t* classes, const Lookup& k, uint32_t low, uint32_t edge[9]) {
    edge[0] = low;
    _mm256_storeu_si256((__m256i*)(edge + 1), edges_above(classes, k, low));
}

WC_INLINE size_t locate(const uint8_t* classes, const Lookup& k, uint32_t low, uint32_t target, uint32_t edge[9]) {
    const __m256i x = edges_above(classes, k, low);
    edge[0] = low;
    _mm256_storeu_si256((__m256i*)(edge + 1), x);
    const __m256i above = _mm256_cmpgt_epi32(x, _mm256_set1_epi32((int)target));
    // The eighth edge is above the target. Bit 7 says so once more, for the reader and for the bounds.
    return (size_t)lowest_bit((uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(above)) | 1u << 7);
}

#include "lanes.inl"
#include "scan.inl"

template <class T>
constexpr Kernels kSet = {scan<T>, diff<T>, encode_lane, decode_lanes};

}  // namespace
}  // namespace avx2

const Kernels& avx2_kernels(int width) {
    return width == 1 ? avx2::kSet<uint8_t> : width == 2 ? avx2::kSet<uint16_t> : avx2::kSet<uint32_t>;
}

}  // namespace weightcast
