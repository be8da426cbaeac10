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

// A hazard table in registers.
struct Lookup {
    __m256i plane[3];
    __m256i lowest, exponent_mask;
    __m128i shift;
};

Lookup make_lookup(const HazardTable& t, int width) {
    Lookup k;
    for (int byte = 0; byte < 3; byte++)
        k.plane[byte] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)t.plane[byte]));
    const int mask = (1 << t.field.exponent_bits) - 1;
    k.lowest = _mm256_set1_epi8((char)t.lowest);
    k.exponent_mask = width == 1 ? _mm256_set1_epi8((char)mask) : width == 2 ? _mm256_set1_epi16((short)mask) : _mm256_set1_epi32(mask);
    k.shift = _mm_cvtsi32_si128(t.field.mantissa_bits);
    return k;
}

// The exponents of 32 weights as bytes, in order.
WC_INLINE __m256i exponents(const uint8_t* w, const Lookup& k) {
    return _mm256_and_si256(_mm256_srl_epi16(load(w), k.shift), k.exponent_mask);
}

WC_INLINE __m256i exponents(const uint16_t* w, const Lookup& k) {
    const __m256i a = load_halves(w, w + 16), b = load_halves(w + 8, w + 24);
    return _mm256_packus_epi16(_mm256_and_si256(_mm256_srl_epi16(a, k.shift), k.exponent_mask),
                               _mm256_and_si256(_mm256_srl_epi16(b, k.shift), k.exponent_mask));
}

WC_INLINE __m256i exponents(const uint32_t* w, const Lookup& k) {
    __m256i e[4];
    for (int i = 0; i < 4; i++)
        e[i] = _mm256_and_si256(_mm256_srl_epi32(load_halves(w + 4 * i, w + 4 * i + 16), k.shift), k.exponent_mask);
    return _mm256_packus_epi16(_mm256_packus_epi32(e[0], e[1]), _mm256_packus_epi32(e[2], e[3]));
}

// Hazard sums of four groups of 8 weights, as 64-bit numbers: byte plane by byte plane.
template <class T>
WC_INLINE __m256i group_sums(const T* w, const Lookup& k) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i c = _mm256_min_epu8(_mm256_subs_epu8(exponents(w, k), k.lowest), _mm256_set1_epi8(kClasses - 1));
    const __m256i low = _mm256_sad_epu8(_mm256_shuffle_epi8(k.plane[0], c), zero);
    const __m256i middle = _mm256_sad_epu8(_mm256_shuffle_epi8(k.plane[1], c), zero);
    const __m256i high = _mm256_sad_epu8(_mm256_shuffle_epi8(k.plane[2], c), zero);
    return _mm256_add_epi64(low, _mm256_add_epi64(_mm256_slli_epi64(middle, 8), _mm256_slli_epi64(high, 16)));
}

// Prefix sums of the groups of 64 weights, within each half of the register: 0-3 and 4-7.
template <class T>
WC_INLINE __m256i half_prefixes(const T* w, const Lookup& k) {
    const __m256i a = group_sums(w, k), b = group_sums(w + 32, k);
    __m256i x = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0x88));
    x = _mm256_permute4x64_epi64(x, 0xD8);
    x = _mm256_add_epi32(x, _mm256_slli_si256(x, 4));
    return _mm256_add_epi32(x, _mm256_slli_si256(x, 8));
}

template <class T>
WC_INLINE void scan_block(const T* w, const Lookup& k, BlockSums& out) {
    const __m256i x[4] = {half_prefixes(w, k), half_prefixes(w + 64, k), half_prefixes(w + 128, k), half_prefixes(w + 192, k)};
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

template <class T>
void scan(const void* weights, size_t count, const HazardTable& hazards, BlockSums* sums) {
    const T* w = (const T*)weights;
    const Lookup k = make_lookup(hazards, sizeof(T));
    for (; count >= kBlock; count -= kBlock, w += kBlock) scan_block(w, k, *sums++);
    if (count) portable_kernels(sizeof(T)).scan(w, count, hazards, sums);
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

template <class T>
void diff(const void* a, const void* b, size_t count, uint64_t* masks) {
    const T *x = (const T*)a, *y = (const T*)b;
    for (; count >= 64; count -= 64, x += 64, y += 64) *masks++ = ~equal64(x, y);
    if (count) portable_kernels(sizeof(T)).diff(x, y, count, masks);
}

WC_INLINE size_t groups_at_most(const uint32_t sums[32], uint32_t target) {
    // Signed comparison: sums and target are below 2^31.
    const __m256i t = _mm256_set1_epi32((int)target);
    const __m256i a = _mm256_packs_epi32(_mm256_cmpgt_epi32(load(sums), t), _mm256_cmpgt_epi32(load(sums + 8), t));
    const __m256i b = _mm256_packs_epi32(_mm256_cmpgt_epi32(load(sums + 16), t), _mm256_cmpgt_epi32(load(sums + 24), t));
    return 32 - (size_t)__builtin_popcount((uint32_t)_mm256_movemask_epi8(_mm256_packs_epi16(a, b)));
}

#include "lanes.inl"

template <class T>
constexpr Kernels kSet = {scan<T>, diff<T>, decode_lanes<T>};

}  // namespace
}  // namespace avx2

const Kernels& avx2_kernels(int width) {
    return width == 1 ? avx2::kSet<uint8_t> : width == 2 ? avx2::kSet<uint16_t> : avx2::kSet<uint32_t>;
}

}  // namespace weightcast
