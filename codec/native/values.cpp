#include "values.hpp"

#include <algorithm>

namespace weightcast {
namespace {

template <class T>
WC_INLINE uint32_t sign_flip(T before, T after) {
    return (uint32_t)((T)(before ^ after) >> (sizeof(T) * 8 - 1));
}

template <class T>
WC_INLINE Value exponent_value(T before, T after, const Field& field, int top) {
    const int exponent = (int)(after >> field.mantissa_bits) & ((1 << field.exponent_bits) - 1);
    const int s = 2 * (top - exponent) + (int)sign_flip(before, after);
    if (exponent > top || s >= kExponentSymbols) return {kEscape, after, 0};
    return {s, after & (((uint32_t)1 << field.mantissa_bits) - 1), 0};
}

template <class T>
WC_INLINE void put_value(T before, T after, const ValueModel& m, const Field& field, uint64_t& state,
                         uint32_t*& words) {
    if (WC_LIKELY(m.mode == Mode::step)) {
        const Value v = step_value(before, after);
        const int raw = step_raw_bits(v.symbol);
        if (raw) rans_put(state, words, v.raw, 1, raw);
        const uint32_t start = (v.falls << kFrequencyBits) + m.cumulative[v.symbol];
        return rans_put(state, words, start, m.frequency[v.symbol], kFrequencyBits + 1);
    }
    constexpr int half = sizeof(T) * 4;
    const Value v = exponent_value(before, after, field, m.top);
    if (v.symbol == kEscape) {
        rans_put(state, words, v.raw >> half, 1, half);
        rans_put(state, words, v.raw & ((1u << half) - 1), 1, half);
    } else {
        rans_put(state, words, v.raw, 1, field.mantissa_bits);
    }
    rans_put(state, words, m.cumulative[v.symbol], m.frequency[v.symbol], kFrequencyBits);
}

}  // namespace

template <class T>
void count_exponents(Changes<T>& changes, const Model& model, ValueCounts& counts) {
    counts.find_large_steps();
    if (std::none_of(counts.wants_exponent, counts.wants_exponent + kClasses, [](bool b) { return b; })) return;
    const uint32_t mask = (1u << model.field.exponent_bits) - 1;
    const int shift = model.field.mantissa_bits;
    for (size_t i = 0; i < changes.before.size(); i++) {
        const T before = changes.before[i], after = changes.after[i];
        const int c = model.class_of_key((int)(before >> shift));
        if (counts.wants_exponent[c])
            counts.exponent[c][2 * ((uint32_t)(after >> shift) & mask) + sign_flip(before, after)]++;
    }
}

size_t most_words(const ValueCounts& counts, const Model& model) {
    size_t words = 0;
    for (int c = 0; c < kClasses; c++) {
        const bool exponents = model.values[model.value_of[c]].mode == Mode::exponent;
        for (int s = 0; s < kSymbols; s++)
            words += (size_t)counts.step[c][s] * (exponents ? 3 : step_raw_bits(s) ? 2 : 1);
    }
    return words;
}

template <class T>
uint32_t* put_values(Changes<T>& changes, const Model& model, uint32_t* words, uint64_t states[2]) {
    const ValueModel* by_key[kMaxKeys];
    for (int key = 0; key < kMaxKeys; key++)
        by_key[key] = &model.values[model.value_of[model.class_of_key(key & (model.keys() - 1))]];
    const T *before = changes.before.data(), *after = changes.after.data();
    const Field field = model.field;
    size_t i = changes.before.size();
    uint64_t even = states[0], odd = states[1];
    if (i & 1) {
        i--;
        put_value(before[i], after[i], *by_key[before[i] >> field.mantissa_bits], field, even, words);
    }
    while (i) {
        i -= 2;
        put_value(before[i + 1], after[i + 1], *by_key[before[i + 1] >> field.mantissa_bits], field, odd, words);
        put_value(before[i], after[i], *by_key[before[i] >> field.mantissa_bits], field, even, words);
    }
    states[0] = even;
    states[1] = odd;
    return words;
}

template void count_exponents(Changes<uint8_t>&, const Model&, ValueCounts&);
template void count_exponents(Changes<uint16_t>&, const Model&, ValueCounts&);
template void count_exponents(Changes<uint32_t>&, const Model&, ValueCounts&);
template uint32_t* put_values(Changes<uint8_t>&, const Model&, uint32_t*, uint64_t[2]);
template uint32_t* put_values(Changes<uint16_t>&, const Model&, uint32_t*, uint64_t[2]);
template uint32_t* put_values(Changes<uint32_t>&, const Model&, uint32_t*, uint64_t[2]);

}  // namespace weightcast
