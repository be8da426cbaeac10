#include <algorithm>

#include "chunk.hpp"
#include "values.hpp"

namespace weightcast {
namespace {

// The sample is runs of this many weights, one in sample_stride(): memory is fast only along a line of addresses.
constexpr size_t kRun = 256;

size_t sample_stride(size_t count) { return std::clamp<size_t>(count >> 18, 1, 16); }

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

template <class T>
Sample take_sample(const T* base, const T* fresh, size_t count, Field field, const Kernels& kernels) {
    Histogram seen;
    Sample sample;
    const size_t stride = sample_stride(count), mask = ((size_t)1 << field.exponent_bits) - 1;
    sample.complete = stride == 1;
    for (size_t i = 0; i < count; i += kRun * stride) {
        const size_t here = std::min(kRun, count - i);
        if (stride > 1) {
            for (size_t line = 0; line < kRun * sizeof(T); line += 64) {
                prefetch(base + i, 2 * kRun * stride * sizeof(T) + line);
                prefetch(fresh + i, 2 * kRun * stride * sizeof(T) + line);
            }
        }
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

void encode_events(LaneEvents& lane, const Scan& scan, const HazardTable& hazards, const Kernels& kernels, Found& found,
                   Ahead ahead) {
    lane.events.reserve(kMostEvents);
    Interval* const begin = lane.events.data();
    LaneEncoder encoder = {lane.base, lane.events.end(), begin + lane.used};
    kernels.encode(encoder, scan, hazards, found, ahead);
    lane.base = encoder.base;
    lane.used = (size_t)(encoder.used - begin);
    lane.events.set_end(encoder.end);
}

// Takes over the changed weights of a segment and counts their steps.
template <class T>
void collect(const T* base, const T* fresh, const Scan& scan, const Found& found, Changes<T>& changes,
             ValueCounts& counts) {
    changes.before.reserve(found.count);
    changes.after.reserve(found.count);
    T *const before = changes.before.end(), *const after = changes.after.end();
    for (size_t i = 0; i < found.count; i++) {
        const size_t at = found.positions[i];
        before[i] = base[at];
        after[i] = fresh[at];
        counts.step[scan.classes[at]][step_value(before[i], after[i]).symbol]++;
    }
    changes.before.set_end(before + found.count);
    changes.after.set_end(after + found.count);
}

// The words of some events, which lie over them.
struct EventWords {
    uint32_t *begin, *end;
};

// Encodes the events, last first, into the memory they take: an event has the size of two words and becomes one at most,
// so that after n of them no write is more than n words below the end, and never below what is being read.
EventWords put_events(LaneEvents& lane, uint64_t states[2]) {
    static_assert(sizeof(Interval) == 2 * sizeof(uint32_t), "events and words share memory");
    const Interval* events = lane.events.data();
    size_t i = lane.used;
    uint32_t* const end = (uint32_t*)(lane.events.data() + i);
    uint32_t* words = end;
    uint64_t even = states[0], odd = states[1];
    if (i & 1) {
        i--;
        rans_put(even, words, events[i].start, events[i].width, kSurvivalBits);
    }
    while (i) {
        i -= 2;
        rans_put(odd, words, events[i + 1].start, events[i + 1].width, kSurvivalBits);
        rans_put(even, words, events[i].start, events[i].width, kSurvivalBits);
    }
    states[0] = even;
    states[1] = odd;
    return {words, end};
}

void write_words(std::vector<uint8_t>& out, const uint32_t* begin, const uint32_t* end) {
    size_t at = out.size();
    out.resize(at + (size_t)(end - begin) * 4);
    for (; begin < end; begin++, at += 4) store_u32(out.data() + at, *begin);
}

// Encodes the three streams and appends states, lengths and words. value_words: at most.
template <class T>
void write_streams(Workspace<T>& work, const Model& model, size_t value_words, std::vector<uint8_t>& out) {
    work.words.clear();
    work.words.reserve(value_words + 1);
    uint64_t states[3][2];
    std::fill(&states[0][0], &states[0][0] + 6, kStateLow);
    uint32_t* const values_end = work.words.data() + value_words + 1;
    uint32_t* const values = put_values(work.changes, model, values_end, states[2]);
    EventWords of_lane[2];
    Writer writer(out);
    for (int i = 0; i < 2; i++) {
        of_lane[i] = put_events(work.lanes[i], states[i]);
        if (!work.lanes[i].used) continue;
        writer.varint(states[i][0] - kStateLow);
        writer.varint(states[i][1] - kStateLow);
        writer.varint((uint64_t)(of_lane[i].end - of_lane[i].begin));
    }
    writer.varint(states[2][0] - kStateLow);
    writer.varint(states[2][1] - kStateLow);
    for (const EventWords& words : of_lane) write_words(out, words.begin, words.end);
    write_words(out, values, values_end);
}

// Ends at the first segment that differs; the trails have reached it.
template <class T>
bool same(const T* base, const T* fresh, size_t count, Trails& trails) {
    for (size_t i = 0; i < count; i += kSegment) {
        const size_t here = std::min(kSegment, count - i);
        if (std::memcmp(base + i, fresh + i, here * sizeof(T))) return false;
        trails.reach(base + i + here, fresh + i + here);
    }
    return true;
}

}  // namespace

template <class T>
uint64_t encode_chunk(const T* base, const T* fresh, size_t count, Field field, const Kernels& kernels,
                      Workspace<T>& work, Trails& trails, std::vector<uint8_t>& out) {
    const Sample sample = take_sample(base, fresh, count, field, kernels);
    const bool none = std::all_of(sample.changed, sample.changed + kMaxKeys / 2, [](uint32_t k) { return k == 0; });
    Writer writer(out);
    if (none && same(base, fresh, count, trails)) {
        writer.varint(0);
        if (count > kSegment) writer.varint(0);
        return 0;
    }
    Model model;
    model.field = field;
    choose_hazards(sample, model);
    const HazardTable hazards = make_hazards(model);
    work.clear();
    ValueCounts counts;
    uint64_t changes_of[2] = {0, 0};
    Scan scan;
    Found found;
    for (size_t i = 0; i < count; i += kSegment) {
        const size_t lane = i / kSegment & 1, here = std::min(kSegment, count - i);
        kernels.scan(base + i, fresh + i, here, hazards, scan);
        trails.reach(base + i + here, fresh + i + here);
        const Ahead ahead = {fresh + i + here, here == kSegment ? kBlock * sizeof(T) : 0};
        encode_events(work.lanes[lane], scan, hazards, kernels, found, ahead);
        collect(base + i, fresh + i, scan, found, work.changes, counts);
        changes_of[lane] += found.count;
    }
    writer.varint(changes_of[0]);
    if (count > kSegment) writer.varint(changes_of[1]);
    count_exponents(work.changes, model, counts);
    choose_values(counts, (int)sizeof(T) * 8, model);
    model.write(writer);
    write_streams(work, model, most_words(counts, model), out);
    return changes_of[0] + changes_of[1];
}

template uint64_t encode_chunk(const uint8_t*, const uint8_t*, size_t, Field, const Kernels&, Workspace<uint8_t>&,
                               Trails&, std::vector<uint8_t>&);
template uint64_t encode_chunk(const uint16_t*, const uint16_t*, size_t, Field, const Kernels&, Workspace<uint16_t>&,
                               Trails&, std::vector<uint8_t>&);
template uint64_t encode_chunk(const uint32_t*, const uint32_t*, size_t, Field, const Kernels&, Workspace<uint32_t>&,
                               Trails&, std::vector<uint8_t>&);

}  // namespace weightcast
