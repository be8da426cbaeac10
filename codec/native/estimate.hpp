// Chooses a chunk's model. Integers only, so that every machine writes the same bytes; a decoder does not depend on it.
#pragma once

#include "model.hpp"

namespace weightcast {

// Weights by exponent of the old weight: how many were looked at, how many of them change.
struct Sample {
    uint32_t seen[kMaxKeys / 2] = {};
    uint32_t changed[kMaxKeys / 2] = {};
    bool complete = false;  // every weight of the chunk was looked at
};

// Ideal bits, Q32, of saying which k of n weights change; n <= 2^24.
int64_t choice_cost(uint64_t k, uint64_t n);

// Sets lowest and code. In an incomplete sample every class gets a hazard, for changes that it missed.
void choose_hazards(const Sample& sample, Model& model);

// How often each symbol occurs in the changes of each class, under both modes.
struct ValueCounts {
    uint32_t step[kClasses][kSymbols] = {};
    uint32_t exponent[kClasses][kMaxKeys] = {};  // by 2 * new exponent + sign flip; only where wanted
    bool wants_exponent[kClasses] = {};          // steps are large: count for mode exponent too

    // Call when the steps are counted.
    void find_large_steps();
};

// Sets values and value_of. width: bits of a weight.
void choose_values(const ValueCounts& counts, int width, Model& model);

}  // namespace weightcast
