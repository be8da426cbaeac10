// Words shared by all kernels. Nothing here has external linkage: files that are compiled for AVX2 include this
// header too, and a function merged by the linker across instruction sets would crash an older processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define WC_INLINE static inline __attribute__((always_inline))
#define WC_LIKELY(x) __builtin_expect(!!(x), 1)
#define WC_UNLIKELY(x) __builtin_expect(!!(x), 0)

namespace weightcast {

// The floating point layout of a dtype: sign, then exponent, then mantissa.
struct Field {
    int exponent_bits;
    int mantissa_bits;
};

// Number of values of sign and exponent together, the index of every look-up by old weight (at most 512).
constexpr int kMaxKeys = 512;

// Asks for memory `bytes` past p. The address need not exist: a prefetch never faults.
WC_INLINE void prefetch(const void* p, size_t bytes) {
    __builtin_prefetch((const void*)((uintptr_t)p + bytes));
}

// log2 of an x > 0, rounded down.
WC_INLINE int floor_log2(uint64_t x) { return 63 - __builtin_clzll(x); }

WC_INLINE int lowest_bit(uint64_t x) { return __builtin_ctzll(x); }

WC_INLINE int bit_count(uint64_t x) { return __builtin_popcountll(x); }

// Words on the wire are little-endian. Compilers fold this into one load or store.
WC_INLINE uint32_t load_u32(const uint8_t* p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

WC_INLINE void store_u32(uint8_t* p, uint32_t v) {
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    p[2] = (uint8_t)(v >> 16);
    p[3] = (uint8_t)(v >> 24);
}

// The bits as an integer whose order is that of the values: negative numbers have their magnitude bits inverted.
// Its own inverse, so NaN payloads, infinities, -0 and subnormals all survive. Arithmetic on it is modulo 2^width.
template <class T>
WC_INLINE T ordered(T bits) {
    constexpr int top = sizeof(T) * 8 - 1;
    const T magnitude = (T)(((T)1 << top) - 1);
    return (T)(bits ^ ((T)(0 - (bits >> top)) & magnitude));
}

}  // namespace weightcast
