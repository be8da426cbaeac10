// Constants of ulp_v1 as FORMAT-ulp.md defines them: survival 2^-x, hazards, the integer logarithm of the estimator.
#pragma once

#include "common.hpp"

namespace weightcast {

constexpr int kHazardBits = 20;                       // hazards are in units of 2^-20 bit
constexpr uint32_t kHazardLimit = 8u << kHazardBits;  // beyond 8 bits a skip event is coded
constexpr int kHazardCodes = 176;                     // codes 0..175, the largest stands for 7.34 bits
constexpr int kSurvivalBits = 29;                     // probabilities are in units of 2^-29

struct SurvivalTables {
    uint32_t coarse[1024];        // floor(2^31 * 2^(-i / 2^10))
    uint32_t fine[1024];          // floor(2^31 * 2^(-i / 2^20))
    uint32_t log_mantissa[1025];  // about 2^28 * log2(1 + i / 1024); only speeds up the decoder's search
};

// Built once at load, with integers only.
extern const SurvivalTables kSurvival;

// S(x) = 2^-x for x <= kHazardLimit in Q20, the result in Q29.
WC_INLINE uint32_t survival(const SurvivalTables& t, uint32_t x) {
    return (uint32_t)(((uint64_t)t.coarse[(x >> 10) & 1023] * t.fine[x & 1023]) >> (62 - kSurvivalBits)) >> (x >> 20);
}

// A hazard whose survival is above u: at most the largest such one, and at most a few units below it.
// The caller verifies and falls back to exact_hazard.
WC_INLINE uint32_t hazard_below(const SurvivalTables& t, uint32_t u) {
    const uint32_t v = u + 1;
    const int top = floor_log2(v);
    const uint32_t fraction = (uint32_t)(((uint64_t)v << (31 - top)) & 0x7fffffff);
    const uint32_t i = fraction >> 21, rest = (fraction >> 5) & 0xffff;
    const uint32_t low = t.log_mantissa[i], high = t.log_mantissa[i + 1];
    const uint32_t log2 = (low + (uint32_t)(((uint64_t)(high - low) * rest) >> 16)) >> 8;
    const int x = ((kSurvivalBits - top) << kHazardBits) - (int)log2 - 2;
    const uint32_t clamped = x < 0 ? 0 : (uint32_t)x;
    return clamped > kHazardLimit ? kHazardLimit : clamped;
}

// The largest x <= kHazardLimit with S(x) > u. Slow; needs S(0) > u, which holds for every u < 2^29.
uint32_t exact_hazard(uint32_t u);

// Hazard of a code < kHazardCodes: 0 for 0, otherwise 2^(1 + code / 8) in Q20, rounded down.
uint32_t hazard_of_code(int code);

// log2(x) in Q32 for x >= 1, by 32 squarings: the same on every machine.
uint64_t log2_q32(uint64_t x);

}  // namespace weightcast
