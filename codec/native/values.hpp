// The encoder's side of new values: what symbol a change is, how often each occurs, and their stream.
#pragma once

#include "buffer.hpp"
#include "estimate.hpp"
#include "rans.hpp"

namespace weightcast {

// Old and new bits of the changed weights, in order.
template <class T>
struct Changes {
    Buffer<T> before, after;
};

// Symbol, raw bits and direction of one new value.
struct Value {
    int symbol;
    uint32_t raw;
    uint32_t falls;  // mode step: the value moved down
};

template <class T>
WC_INLINE Value step_value(T before, T after) {
    constexpr int top = sizeof(T) * 8 - 1;
    const T step = (T)(ordered(after) - ordered(before));
    const uint32_t falls = (uint32_t)(step >> top);
    // Without a branch, even where the compiler would like one: a direction is as good as random.
    const uint32_t m = (uint32_t)(T)((step ^ (T)(0 - falls)) + falls) - 1;
    const int s = step_symbol(m);
    return {s, m - step_base(s), falls};
}

// Counts both modes' symbols: steps were counted as the changes were found, exponents only where steps are large.
template <class T>
void count_exponents(Changes<T>& changes, const Model& model, ValueCounts& counts);

// How many words the values can take: one a put.
size_t most_words(const ValueCounts& counts, const Model& model);

// Encodes the values, last first, below `words`, where there is room for most_words() and one that is not kept; returns
// where the words begin.
template <class T>
uint32_t* put_values(Changes<T>& changes, const Model& model, uint32_t* words, uint64_t states[2]);

}  // namespace weightcast
