#include "estimate.hpp"

#include <algorithm>

namespace weightcast {
namespace {

// x * log2(x) in Q32; x <= 2^24, so the product stays below 2^61.
int64_t x_log_x(uint64_t x) { return x ? (int64_t)(x * log2_q32(x)) : 0; }

// Classes 1 to 14 are one exponent each. They begin as low as costs next to nothing more than the best: small weights
// take long steps, which are shorter to say where each exponent has a model of its own.
int choose_lowest(const Sample& sample, int exponents) {
    if (exponents <= kClasses) return 0;
    uint64_t seen[257] = {}, changed[257] = {};
    int64_t single[257] = {};
    for (int e = 0; e < exponents; e++) {
        seen[e + 1] = seen[e] + sample.seen[e];
        changed[e + 1] = changed[e] + sample.changed[e];
        single[e + 1] = single[e] + choice_cost(sample.changed[e], sample.seen[e]);
    }
    // Class 0 is what lies below an exponent, class 15 what lies from one on. Most exponents do not occur at all, and
    // these two cost there what they cost one exponent before.
    int64_t below[257] = {}, from[257] = {};
    for (int e = 0; e <= exponents; e++) {
        const bool again = e && seen[e] == seen[e - 1];
        below[e] = again ? below[e - 1] : choice_cost(changed[e], seen[e]);
        from[e] = again ? from[e - 1] : choice_cost(changed[exponents] - changed[e], seen[exponents] - seen[e]);
    }
    std::vector<int64_t> costs;
    for (int lowest = 0; lowest + kClasses <= exponents; lowest++) {
        const int low = lowest + 1, high = lowest + kClasses - 1;
        costs.push_back(below[low] + single[high] - single[low] + from[high]);
    }
    const int64_t least = *std::min_element(costs.begin(), costs.end()), most = least + (least >> 11);
    return (int)(std::find_if(costs.begin(), costs.end(), [&](int64_t c) { return c <= most; }) - costs.begin());
}

// The code whose probability of change is nearest to (8k + 1) / (8n + 8).
int code_for(uint64_t k, uint64_t n) {
    const auto change = [](int code) { return (1ull << kSurvivalBits) - survival(kSurvival, hazard_of_code(code)); };
    const uint64_t seen = 8 * n + 8, wanted = (8 * k + 1) << (kSurvivalBits + 1);
    int low = 1, high = kHazardCodes - 1;  // change() grows with the code
    while (low < high) {
        const int middle = (low + high) / 2;
        if (seen * (change(middle) + change(middle + 1)) < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct Candidate {
    Mode mode;
    int top;
    uint64_t total;
    uint32_t count[kSymbols];
    int64_t cost;  // Q32 bits, the model's own included
};

void price(Candidate& c, int width, int mantissa_bits) {
    constexpr int64_t kSeen = 9, kUnseen = 1, kFixed = 16;  // about what a frequency and a model cost in the header
    const int64_t log_total = (int64_t)log2_q32(c.total);
    int64_t bits = kFixed;
    c.cost = 0;
    for (int s = 0; s < kSymbols; s++) {
        const int64_t k = c.count[s];
        bits += k ? kSeen : kUnseen;
        if (!k) continue;
        c.cost += k * (log_total - (int64_t)log2_q32((uint64_t)k));
        bits += k * (c.mode == Mode::step ? 1 + step_raw_bits(s) : s == kEscape ? width : mantissa_bits);
    }
    c.cost += bits << 32;
}

Candidate step_candidate(const uint32_t* count, int width, int mantissa_bits) {
    Candidate c = {Mode::step, 0, 0, {}, 0};
    for (int s = 0; s < kSymbols; s++) c.count[s] = count[s], c.total += count[s];
    price(c, width, mantissa_bits);
    return c;
}

Candidate exponent_candidate(const uint32_t* count, int width, int mantissa_bits) {
    Candidate c = {Mode::exponent, kMaxKeys / 2 - 1, 0, {}, 0};
    while (!count[2 * c.top] && !count[2 * c.top + 1]) c.top--;
    for (int i = 0; i <= 2 * c.top + 1; i++) {
        const int s = 2 * (c.top - i / 2) + (i & 1);
        c.count[s < kExponentSymbols ? s : kEscape] += count[i];
        c.total += count[i];
    }
    price(c, width, mantissa_bits);
    return c;
}

// f in four significant bits, to the nearest (halves up) or down.
uint32_t four_bits(uint32_t f, bool nearest) {
    const int drop = std::max(0, floor_log2(f) - 3);
    return (f + (nearest && drop ? 1u << (drop - 1) : 0)) >> drop << drop;
}

// Frequencies of at least 1 for what occurs, in four significant bits; the most frequent symbol takes the rest.
// Rounded down there is a rest: with b symbols raised to 1, the other s - b <= 125 - b share at least 4096 - b, and the
// largest of them, at least floor((4096 - b) / (125 - b)), exceeds b for every b (the closest are 54 to 59, by 2).
ValueModel normalise(const Candidate& c) {
    ValueModel v;
    v.mode = c.mode;
    v.top = (uint8_t)c.top;
    v.rest = (uint8_t)(std::max_element(c.count, c.count + kSymbols) - c.count);
    for (const bool nearest : {true, false}) {
        int rest = kFrequencyTotal;
        for (int s = 0; s < kSymbols; s++) {
            if (s == v.rest || !c.count[s]) continue;
            const uint64_t exact = (uint64_t)c.count[s] * kFrequencyTotal / c.total;
            v.frequency[s] = (uint16_t)four_bits((uint32_t)std::max<uint64_t>(1, exact), nearest);
            rest -= v.frequency[s];
        }
        if (rest < 1) continue;
        v.frequency[v.rest] = (uint16_t)rest;
        break;
    }
    v.finish();
    return v;
}

}  // namespace

int64_t choice_cost(uint64_t k, uint64_t n) { return k == 0 || k >= n ? 0 : x_log_x(n) - x_log_x(k) - x_log_x(n - k); }

void choose_hazards(const Sample& sample, Model& model) {
    const int exponents = 1 << model.field.exponent_bits;
    model.lowest = (uint8_t)choose_lowest(sample, exponents);
    uint64_t seen[kClasses] = {}, changed[kClasses] = {};
    for (int e = 0; e < exponents; e++) {
        seen[model.class_of_key(e)] += sample.seen[e];
        changed[model.class_of_key(e)] += sample.changed[e];
    }
    for (int c = 0; c < kClasses; c++)
        model.code[c] = sample.complete && !changed[c] ? 0 : (uint8_t)code_for(changed[c], seen[c]);
}

void ValueCounts::find_large_steps() {
    for (int c = 0; c < kClasses; c++) {
        uint64_t large = 0, all = 0;
        for (int s = 0; s < kSymbols; s++) {
            all += step[c][s];
            if (s >= 4) large += step[c][s];
        }
        wants_exponent[c] = all > 8 && large * 8 > all;
    }
}

void choose_values(const ValueCounts& counts, int width, Model& model) {
    const int mantissa = model.field.mantissa_bits;
    std::vector<Candidate> chosen;
    for (int c = 0; c < kClasses; c++) {
        const bool used = std::any_of(counts.step[c], counts.step[c] + kSymbols, [](uint32_t k) { return k > 0; });
        if (used) {
            Candidate own = step_candidate(counts.step[c], width, mantissa);
            if (counts.wants_exponent[c]) {
                const Candidate other = exponent_candidate(counts.exponent[c], width, mantissa);
                if (other.cost < own.cost) own = other;
            }
            bool joined = false;
            if (!chosen.empty() && chosen.back().mode == Mode::step && own.mode == Mode::step) {
                uint32_t both[kSymbols];
                for (int s = 0; s < kSymbols; s++) both[s] = chosen.back().count[s] + own.count[s];
                const Candidate joint = step_candidate(both, width, mantissa);
                joined = joint.cost <= chosen.back().cost + own.cost;
                if (joined) chosen.back() = joint;
            }
            if (!joined) chosen.push_back(own);
        }
        model.value_of[c] = (uint8_t)(chosen.empty() ? 0 : chosen.size() - 1);
    }
    for (const Candidate& c : chosen) model.values.push_back(normalise(c));
}

}  // namespace weightcast
