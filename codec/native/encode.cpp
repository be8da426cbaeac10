#include <algorithm>

#include "buffer.hpp"
#include "chunk.hpp"
#include "estimate.hpp"

namespace weightcast {
namespace {

struct Interval {
    uint32_t start, width;
};

// Skips of one segment: each passes more than 10 - 7.34 bits of hazard, a segment has at most 4096 * 7.34.
constexpr size_t kMostSkips = 11400;

// The events of a lane so far; hazards are relative to the start of the current block.
struct LaneEvents {
    Buffer<Interval> events;
    int64_t base = 0;
    size_t used = 0;  // events up to the last change: skips after it are not coded
};

template <class T>
struct Changes {
    Buffer<T> before, after;
};

template <class T>
Sample take_sample(const T* base, const T* fresh, size_t count, Field field, const Kernels& kernels) {
    // Four counters, because neighbouring weights often share an exponent and would wait for each other's store.
    Buffer<uint32_t> room(4 * kMaxKeys);
    uint32_t* seen = room.data();
    std::fill(seen, seen + 4 * kMaxKeys, 0);
    Sample sample;
    const size_t stride = sample_stride(count);
    sample.complete = stride == 1;
    const int mask = (1 << field.exponent_bits) - 1;
    for (size_t i = 0; i < count; i += 64 * stride) {
        const size_t here = std::min<size_t>(64, count - i);
        uint64_t differ;
        kernels.diff(base + i, fresh + i, here, &differ);
        for (; differ; differ &= differ - 1) sample.changed[(base[i + (size_t)lowest_bit(differ)] >> field.mantissa_bits) & mask]++;
        for (size_t j = 0; j < here; j++) seen[(j & 3) * kMaxKeys + (size_t)(base[i + j] >> field.mantissa_bits)]++;
    }
    for (size_t key = 0; key < kMaxKeys; key++)
        for (size_t part = 0; part < 4; part++) sample.seen[key & (size_t)mask] += seen[part * kMaxKeys + key];
    return sample;
}

// Where an event begins: the hazard before a weight.
template <class T>
WC_INLINE uint32_t hazard_before(const T* block, size_t at, const BlockSums& sums, const HazardTable& hazards) {
    uint32_t x = sums.sum[at >> 3];
    for (size_t i = at & ~(size_t)7; i < at; i++) x += hazards.by_key[block[i] >> hazards.field.mantissa_bits];
    return x;
}

// The last boundary between weights at or before `limit`, a hazard within the block.
template <class T>
uint32_t boundary_at_most(const T* block, size_t here, int64_t limit, const BlockSums& sums, const HazardTable& hazards) {
    size_t group = 0;
    while (group < 31 && (int64_t)sums.sum[group + 1] <= limit) group++;
    uint32_t x = sums.sum[group];
    for (size_t i = group * 8; i < std::min(group * 8 + 8, here); i++) {
        const uint32_t next = x + hazards.by_key[block[i] >> hazards.field.mantissa_bits];
        if ((int64_t)next > limit) break;
        x = next;
    }
    return x;
}

// Codes skips until `hazard` is within reach of the base.
template <class T>
WC_INLINE void skip_to(int64_t hazard, const T* block, size_t here, const BlockSums& sums, const HazardTable& hazards,
                       int64_t& base, Interval*& end) {
    while (WC_UNLIKELY(hazard - base > (int64_t)kHazardLimit)) {
        const uint32_t x = boundary_at_most(block, here, base + (int64_t)kHazardLimit, sums, hazards);
        *end++ = {0, survival(kSurvival, (uint32_t)((int64_t)x - base))};
        base = x;
    }
}

template <class T>
void encode_segment(const T* base, const T* fresh, size_t count, const HazardTable& hazards, const Kernels& kernels,
                    LaneEvents& lane, Changes<T>& changes) {
    uint64_t masks[kMasks] = {};
    BlockSums sums[kBlocks];
    kernels.diff(base, fresh, count, masks);
    kernels.scan(base, count, hazards, sums);
    lane.events.reserve(kSegment + kMostSkips);
    changes.before.reserve(kSegment);
    changes.after.reserve(kSegment);
    Interval *const events = lane.events.data(), *end = lane.events.end(), *used = events + lane.used;
    T *before = changes.before.end(), *after = changes.after.end();
    int64_t from = lane.base;
    for (size_t b = 0; b * kBlock < count; b++) {
        const T* block = base + b * kBlock;
        const size_t here = std::min(kBlock, count - b * kBlock);
        for (size_t quarter = 0; quarter < 4; quarter++) {
            for (uint64_t m = masks[b * 4 + quarter]; m; m &= m - 1) {
                const size_t at = quarter * 64 + (size_t)lowest_bit(m);
                const uint32_t low = hazard_before(block, at, sums[b], hazards);
                const uint32_t high = low + hazards.by_key[block[at] >> hazards.field.mantissa_bits];
                *before++ = block[at];
                *after++ = fresh[b * kBlock + at];
                skip_to(high, block, here, sums[b], hazards, from, end);
                const uint32_t start = survival(kSurvival, (uint32_t)((int64_t)high - from));
                *end++ = {start, survival(kSurvival, (uint32_t)((int64_t)low - from)) - start};
                used = end;
                from = high;
            }
        }
        skip_to(sums[b].total(), block, here, sums[b], hazards, from, end);
        from -= sums[b].total();
    }
    lane.base = from;
    lane.used = (size_t)(used - events);
    lane.events.set_end(end);
    changes.before.set_end(before);
    changes.after.set_end(after);
}

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
    const uint32_t m = (uint32_t)(T)(falls ? 0 - step : step) - 1;
    const int s = step_symbol(m);
    return {s, m - step_base(s), falls};
}

template <class T>
WC_INLINE Value exponent_value(T before, T after, const Field& field, int top) {
    const int exponent = (int)(after >> field.mantissa_bits) & ((1 << field.exponent_bits) - 1);
    const int flip = (int)((before ^ after) >> (sizeof(T) * 8 - 1));
    const int s = 2 * (top - exponent) + flip;
    if (exponent > top || s >= kExponentSymbols) return {kEscape, after, 0};
    return {s, after & (((uint32_t)1 << field.mantissa_bits) - 1), 0};
}

template <class T>
void count_values(Changes<T>& changes, const Model& model, ValueCounts& counts) {
    uint8_t class_of[kMaxKeys];
    for (int key = 0; key < kMaxKeys; key++) class_of[key] = (uint8_t)model.class_of_key(key & (model.keys() - 1));
    const int shift = model.field.mantissa_bits;
    const size_t n = changes.before.size();
    for (size_t i = 0; i < n; i++) {
        const T before = changes.before[i];
        counts.step[class_of[before >> shift]][step_value(before, changes.after[i]).symbol]++;
    }
    counts.find_large_steps();
    if (std::none_of(counts.wants_exponent, counts.wants_exponent + kClasses, [](bool b) { return b; })) return;
    const uint32_t mask = (1u << model.field.exponent_bits) - 1;
    for (size_t i = 0; i < n; i++) {
        const T before = changes.before[i], after = changes.after[i];
        const int c = class_of[before >> shift];
        if (!counts.wants_exponent[c]) continue;
        const uint32_t flip = (uint32_t)((T)(before ^ after) >> (sizeof(T) * 8 - 1));
        counts.exponent[c][2 * ((uint32_t)(after >> shift) & mask) + flip]++;
    }
}

// Encodes the values, last first; returns where the words begin.
template <class T>
uint32_t* put_values(Changes<T>& changes, const Model& model, uint32_t* words, uint64_t states[2]) {
    const ValueModel* by_key[kMaxKeys];
    for (int key = 0; key < kMaxKeys; key++)
        by_key[key] = &model.values[model.value_of[model.class_of_key(key & (model.keys() - 1))]];
    constexpr int half = sizeof(T) * 4;
    for (size_t i = changes.before.size(); i-- > 0;) {
        const T before = changes.before[i], after = changes.after[i];
        const ValueModel& m = *by_key[before >> model.field.mantissa_bits];
        uint64_t& state = states[i & 1];
        if (m.mode == Mode::step) {
            const Value v = step_value(before, after);
            const int raw = step_raw_bits(v.symbol);
            if (raw) rans_put(state, words, v.raw, 1, raw);
            rans_put(state, words, (v.falls << kFrequencyBits) + m.cumulative[v.symbol], m.frequency[v.symbol], kFrequencyBits + 1);
            continue;
        }
        const Value v = exponent_value(before, after, model.field, m.top);
        if (v.symbol == kEscape) {
            rans_put(state, words, v.raw >> half, 1, half);
            rans_put(state, words, v.raw & ((1u << half) - 1), 1, half);
        } else {
            rans_put(state, words, v.raw, 1, model.field.mantissa_bits);
        }
        rans_put(state, words, m.cumulative[v.symbol], m.frequency[v.symbol], kFrequencyBits);
    }
    return words;
}

uint32_t* put_events(LaneEvents& lane, uint32_t* words, uint64_t states[2]) {
    size_t i = lane.used;
    if (i & 1) {
        i--;
        rans_put(states[0], words, lane.events[i].start, lane.events[i].width, kSurvivalBits);
    }
    uint64_t even = states[0], odd = states[1];
    while (i) {
        i -= 2;
        rans_put(odd, words, lane.events[i + 1].start, lane.events[i + 1].width, kSurvivalBits);
        rans_put(even, words, lane.events[i].start, lane.events[i].width, kSurvivalBits);
    }
    states[0] = even;
    states[1] = odd;
    return words;
}

void write_words(std::vector<uint8_t>& out, const uint32_t* begin, const uint32_t* end) {
    size_t at = out.size();
    out.resize(at + (size_t)(end - begin) * 4);
    for (; begin < end; begin++, at += 4) store_u32(out.data() + at, *begin);
}

}  // namespace

template <class T>
uint64_t encode_chunk(const T* base, const T* fresh, size_t count, Field field, const Kernels& kernels,
                      std::vector<uint8_t>& out) {
    Model model;
    model.field = field;
    choose_hazards(take_sample(base, fresh, count, field, kernels), model);
    const HazardTable hazards = make_hazards(model);
    LaneEvents lanes[2];
    Changes<T> changes;
    uint64_t changes_of[2] = {0, 0};
    for (size_t i = 0; i < count; i += kSegment) {
        const size_t lane = i / kSegment & 1, already = changes.before.size();
        encode_segment(base + i, fresh + i, std::min(kSegment, count - i), hazards, kernels, lanes[lane], changes);
        changes_of[lane] += changes.before.size() - already;
    }
    Writer writer(out);
    writer.varint(changes_of[0]);
    if (count > kSegment) writer.varint(changes_of[1]);
    const uint64_t total = changes_of[0] + changes_of[1];
    if (!total) return 0;
    ValueCounts counts;
    count_values(changes, model, counts);
    choose_values(counts, (int)sizeof(T) * 8, model);
    model.write(writer);

    // Three streams, each ending where the one written before it begins. A put spills one word at most.
    const size_t room = lanes[0].used + lanes[1].used + 3 * (size_t)total + 1;
    Buffer<uint32_t> words(room);
    uint64_t states[3][2];
    std::fill(&states[0][0], &states[0][0] + 6, kStateLow);
    uint32_t* const end = words.data() + room;
    uint32_t* const values = put_values(changes, model, end, states[2]);
    uint32_t* const second = put_events(lanes[1], values, states[1]);
    uint32_t* const first = put_events(lanes[0], second, states[0]);
    const uint32_t* const edges[4] = {first, second, values, end};
    for (int s = 0; s < 3; s++) {
        if (s < 2 && !changes_of[s]) continue;
        writer.varint(states[s][0] - kStateLow);
        writer.varint(states[s][1] - kStateLow);
        if (s < 2) writer.varint((uint64_t)(edges[s + 1] - edges[s]));
    }
    write_words(out, first, end);
    return total;
}

template uint64_t encode_chunk(const uint8_t*, const uint8_t*, size_t, Field, const Kernels&, std::vector<uint8_t>&);
template uint64_t encode_chunk(const uint16_t*, const uint16_t*, size_t, Field, const Kernels&, std::vector<uint8_t>&);
template uint64_t encode_chunk(const uint32_t*, const uint32_t*, size_t, Field, const Kernels&, std::vector<uint8_t>&);

}  // namespace weightcast
