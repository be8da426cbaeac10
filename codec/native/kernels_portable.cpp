#include "kernels.hpp"

namespace weightcast {
namespace portable {
namespace {

template <class T>
void scan(const void* weights, size_t count, const HazardTable& hazards, BlockSums* sums) {
    const T* w = (const T*)weights;
    const int shift = hazards.field.mantissa_bits;
    for (; count; sums++) {
        const size_t here = count < kBlock ? count : kBlock;
        uint32_t sum = 0;
        sums->sum[0] = 0;
        for (size_t group = 0; group < 32; group++) {
            for (size_t i = group * 8; i < group * 8 + 8 && i < here; i++) sum += hazards.by_key[w[i] >> shift];
            sums->sum[group + 1] = sum;
        }
        w += here;
        count -= here;
    }
}

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

WC_INLINE size_t groups_at_most(const uint32_t sums[32], uint32_t target) {
    size_t n = 0;
    for (size_t half = 16; half; half >>= 1) n += sums[n + half - 1] <= target ? half : 0;
    return n;
}

#include "lanes.inl"

template <class T>
constexpr Kernels kSet = {scan<T>, diff<T>, decode_lanes<T>};

}  // namespace
}  // namespace portable

const Kernels& portable_kernels(int width) {
    return width == 1 ? portable::kSet<uint8_t> : width == 2 ? portable::kSet<uint16_t> : portable::kSet<uint32_t>;
}

const Kernels& kernels(int width, bool portable) {
#if defined(WEIGHTCAST_AVX2)
    static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    if (avx2 && !portable) return avx2_kernels(width);
#endif
    (void)portable;
    return portable_kernels(width);
}

}  // namespace weightcast
