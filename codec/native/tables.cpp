#include "tables.hpp"

namespace weightcast {
namespace {

// floor(sqrt(x)) for a 128-bit x, bit by bit.
uint64_t square_root(unsigned __int128 x) {
    uint64_t root = 0;
    for (int bit = 63; bit >= 0; bit--) {
        const uint64_t next = root | 1ull << bit;
        if ((unsigned __int128)next * next <= x) root = next;
    }
    return root;
}

// 2^(-2^-k) in Q63 at index k: repeated square roots, each rounded down.
struct Roots {
    uint64_t of[21];
    Roots() {
        of[0] = 1ull << 62;
        for (int k = 1; k <= 20; k++) of[k] = square_root((unsigned __int128)of[k - 1] << 63);
    }
};

// 2^(-i / 2^bits) in Q31 for i < 2^bits. The error of the Q63 product stays below 2^-58, and no entry's exact value
// lies that close to an integer (the tests compare all entries with exact arithmetic), so the floor is the exact one.
uint32_t power(const Roots& roots, uint32_t i, int bits) {
    unsigned __int128 product = (unsigned __int128)1 << 63;
    for (int k = 1; k <= bits; k++)
        if (i >> (bits - k) & 1) product = (product * roots.of[k]) >> 63;
    return (uint32_t)(product >> 32);
}

SurvivalTables build() {
    SurvivalTables t;
    const Roots roots;
    for (uint32_t i = 0; i < 1024; i++) {
        t.coarse[i] = power(roots, i, 10);
        t.fine[i] = power(roots, i, 20);
    }
    for (uint32_t i = 0; i <= 1024; i++) t.log_mantissa[i] = (uint32_t)((log2_q32(1024 + i) - (10ull << 32) + 8) >> 4);
    return t;
}

}  // namespace

const SurvivalTables kSurvival = build();

uint32_t exact_hazard(uint32_t u) {
    uint32_t low = 0, high = kHazardLimit;
    while (low < high) {
        const uint32_t middle = low + (high - low + 1) / 2;
        if (survival(kSurvival, middle) > u)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

uint32_t hazard_of_code(int code) {
    // 2^15 * 2^(i / 8), rounded to nearest.
    static const uint32_t eighth[8] = {32768, 35734, 38968, 42495, 46341, 50535, 55109, 60097};
    return code == 0 ? 0 : (uint32_t)(((uint64_t)eighth[code & 7] << (code >> 3)) >> 14);
}

uint64_t log2_q32(uint64_t x) {
    const int top = floor_log2(x);
    uint64_t y = top > 31 ? x >> (top - 31) : x << (31 - top);  // in [2^31, 2^32)
    uint64_t result = (uint64_t)top;
    for (int bit = 0; bit < 32; bit++) {
        y = (y * y) >> 31;
        const uint64_t carry = y >> 32;
        y >>= carry;
        result = result << 1 | carry;
    }
    return result;
}

}  // namespace weightcast
