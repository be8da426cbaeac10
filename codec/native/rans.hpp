// 64-bit rANS with 32-bit renormalisation. A state lies in [2^31, 2^63); an interval is [start, start + width) of
// 2^bits.
#pragma once

#include "common.hpp"

namespace weightcast {

constexpr uint64_t kStateLow = 1ull << 31;
constexpr uint64_t kStateHigh = 1ull << 63;

// Encoding runs from the last symbol to the first and writes words downwards; the decoder reads them upwards.
// width >= 1, start + width <= 2^bits, bits <= 31: then width << (63 - bits) <= 2^63 fits, and the new state is below
// 2^63 because the state divided by width is below 2^(63 - bits).
WC_INLINE void rans_put(uint64_t& state, uint32_t*& words, uint32_t start, uint32_t width, int bits) {
    uint64_t x = state;
    const bool spill = x >= (uint64_t)width << (63 - bits);
    words[-1] = (uint32_t)x;  // written either way, kept only on a spill: no branch
    words -= spill;
    x = spill ? x >> 32 : x;
    const uint64_t quotient = x / width;
    state = (quotient << bits) + (x - quotient * width) + start;
}

// The words of a stream, in the machine's byte order and followed by one more readable word. Reading past the end
// yields that word and sets no flag: the caller compares the words used and the final states, which a truncated or
// altered stream does not meet except by chance, and the digest settles that.
struct Words {
    const uint32_t* at;
    const uint32_t* end;
};

// Brings a state of at least 1 back to at least 2^31. Safe on any input: at never passes end.
WC_INLINE uint64_t rans_refill(uint64_t state, Words& words) {
    const bool low = state < kStateLow;
    const uint64_t refilled = state << 32 | *words.at;
    const uint32_t* next = words.at + low;
    words.at = next > words.end ? words.end : next;
    return low ? refilled : state;
}

}  // namespace weightcast
