#include "sample.hpp"

#include <algorithm>

namespace weightcast {
namespace {

// Memory is fast only along a line of addresses.
constexpr size_t kRun = 256;
// Runs that are asked for ahead of the one that is counted: no hardware foresees a place as good as random.
constexpr size_t kRunsAhead = 6;
constexpr int kDenseChunk = 22;
constexpr int64_t kModelBits = 1280;  // about what a chunk costs beside its changes
constexpr int kCostBits = 20;         // costs of chunks are in units of 2^-20 bits

// How often each exponent occurs. Eight counters of each, because neighbours often share an exponent and would wait for
// each other's store; weights are read a word at a time.
class Histogram {
  public:
    template <class T>
    void add(const T* weights, size_t count, Field field) {
        constexpr size_t kLanes = 8 / sizeof(T), kBits = 8 * sizeof(T);
        const size_t mask = ((size_t)1 << field.exponent_bits) - 1;
        const uint64_t lanes = mask * (UINT64_MAX / (T)-1);
        size_t i = 0;
        for (; i + 8 <= count; i += 8) {
            for (size_t word = 0; word < 8 / kLanes; word++) {
                uint64_t x;
                std::memcpy(&x, weights + i + word * kLanes, 8);
                x = x >> field.mantissa_bits & lanes;
                for (size_t lane = 0; lane < kLanes; lane++) {
                    seen_[word * kLanes + lane][x & 0xff]++;
                    x >>= kBits % 64;
                }
            }
        }
        for (; i < count; i++) seen_[0][(size_t)(weights[i] >> field.mantissa_bits) & mask]++;
    }

    void sum(uint32_t out[kMaxKeys / 2]) const {
        for (const auto& part : seen_)
            for (size_t e = 0; e < kMaxKeys / 2; e++) out[e] += part[e];
    }

  private:
    uint32_t seen_[8][kMaxKeys / 2] = {};
};

// Which of `stride` runs is looked at, of those from run `first` on. As good as random (the multiplications and the
// shift are those of a 32-bit hash's finish), because rows of a matrix must not all be met at the same columns.
size_t chosen_run(size_t first, size_t stride) {
    uint32_t h = (uint32_t)first * 2654435761u;
    h = (h ^ h >> 15) * 2246822519u;
    return (size_t)((uint64_t)h * stride >> 32);
}

uint64_t total(const uint32_t (&counts)[kMaxKeys / 2]) {
    uint64_t sum = 0;
    for (const uint32_t n : counts) sum += n;
    return sum;
}

int64_t cost_of(uint64_t k, uint64_t n, size_t stride) {
    return (choice_cost(k, n) >> (32 - kCostBits)) * (int64_t)stride;
}

// The cost of one chunk's positions and model, from its sample; `by_exponent` as the model sees them.
int64_t cost_of(const Sample& sample, size_t stride, bool by_exponent) {
    const uint64_t changed = total(sample.changed);
    if (!changed) return 0;
    int64_t cost = kModelBits << kCostBits;
    if (!by_exponent) return cost + cost_of(changed, total(sample.seen), stride);
    for (size_t e = 0; e < kMaxKeys / 2; e++) cost += cost_of(sample.changed[e], sample.seen[e], stride);
    return cost;
}

// The chunk that costs least; a smaller one has to save one part in 32.
int cheapest(const Survey& survey, int largest, bool by_exponent) {
    int best = largest;
    int64_t most = INT64_MAX;
    for (int c = largest; c >= kSmallestChosen; c--) {
        const size_t parts = (size_t)1 << (c - kSmallestChosen);
        int64_t cost = 0;
        for (size_t i = 0; i < survey.parts.size(); i += parts)
            cost += cost_of(survey.sum(i * kPart, parts * kPart), survey.stride, by_exponent);
        if (cost >= most) continue;
        best = c;
        most = c == largest ? cost - cost / 32 : cost;
    }
    return best;
}

}  // namespace

size_t sample_stride(size_t count) {
    size_t stride = 16;
    while (stride > 1 && count >> 18 < stride) stride /= 2;
    return stride;
}

template <class T>
Sample take_sample(const T* base, const T* fresh, size_t first, size_t count, size_t stride, Field field,
                   const Kernels& kernels) {
    Histogram seen;
    Sample sample;
    const size_t mask = ((size_t)1 << field.exponent_bits) - 1, step = kRun * stride;
    sample.complete = stride == 1;
    const auto run_in = [&](size_t block) { return block + kRun * chosen_run(block / kRun, stride); };
    for (size_t block = first; block < first + count; block += step) {
        const size_t i = run_in(block);
        if (stride > 1) {
            const size_t ahead = (run_in(block + kRunsAhead * step) - i) * sizeof(T);
            for (size_t line = 0; line < kRun * sizeof(T); line += 64) {
                prefetch(base + i, ahead + line);
                prefetch(fresh + i, ahead + line);
            }
        }
        if (i >= first + count) continue;
        const size_t here = std::min(kRun, first + count - i);
        uint64_t differ[kRun / 64] = {};
        kernels.diff(base + i, fresh + i, here, differ);
        for (size_t j = 0; j < kRun / 64; j++)
            for (uint64_t m = differ[j]; m; m &= m - 1)
                sample.changed[(size_t)(base[i + j * 64 + (size_t)lowest_bit(m)] >> field.mantissa_bits) & mask]++;
        seen.add(base + i, here, field);
    }
    seen.sum(sample.seen);
    return sample;
}

Sample Survey::sum(size_t first, size_t count) const {
    Sample sum = {};
    sum.complete = stride == 1;
    const size_t end = std::min(parts.size(), (first + count + kPart - 1) / kPart);
    for (size_t i = first / kPart; i < end; i++) {
        for (size_t e = 0; e < kMaxKeys / 2; e++) {
            sum.seen[e] += parts[i].seen[e];
            sum.changed[e] += parts[i].changed[e];
        }
    }
    return sum;
}

template <class T>
Survey take_survey(const T* base, const T* fresh, size_t count, Field field, const Kernels& kernels) {
    Survey survey = {sample_stride(count), {}};
    for (size_t i = 0; i < count; i += kPart)
        survey.parts.push_back(
            take_sample(base, fresh, i, std::min(kPart, count - i), survey.stride, field, kernels));
    return survey;
}

// Chunks share no model, so large ones are smaller in sum, unless changes are elsewhere more frequent than their
// exponents say: experts that no token met, embeddings. But an encoder holds the events of a chunk in memory, so that a
// dense delta, whose models cost next to nothing, takes small ones.
int choose_chunk(const Survey& survey) {
    if (survey.parts.size() < 2) return kLargestChunk;
    const Sample all = survey.sum(0, survey.parts.size() * kPart);
    const int largest = total(all.changed) * 64 > total(all.seen) ? kDenseChunk : kLargestChunk;
    if (cheapest(survey, largest, false) == largest) return largest;
    return cheapest(survey, largest, true);
}

template Sample take_sample(const uint8_t*, const uint8_t*, size_t, size_t, size_t, Field, const Kernels&);
template Sample take_sample(const uint16_t*, const uint16_t*, size_t, size_t, size_t, Field, const Kernels&);
template Sample take_sample(const uint32_t*, const uint32_t*, size_t, size_t, size_t, Field, const Kernels&);
template Survey take_survey(const uint8_t*, const uint8_t*, size_t, Field, const Kernels&);
template Survey take_survey(const uint16_t*, const uint16_t*, size_t, Field, const Kernels&);
template Survey take_survey(const uint32_t*, const uint32_t*, size_t, Field, const Kernels&);

}  // namespace weightcast
