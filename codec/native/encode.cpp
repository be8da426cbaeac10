#include <algorithm>

#include "chunk.hpp"
#include "values.hpp"

namespace weightcast {
namespace {

// False if a change has no chance in the model.
bool encode_events(LaneEvents& lane, const Scan& scan, const HazardTable& hazards, const Kernels& kernels, Found& found,
                   Ahead ahead) {
    lane.events.reserve(kMostEvents);
    Interval* const begin = lane.events.data();
    LaneEncoder encoder = {lane.base, lane.events.end(), begin + lane.used, false};
    kernels.encode(encoder, scan, hazards, found, ahead);
    lane.base = encoder.base;
    lane.used = (size_t)(encoder.used - begin);
    lane.events.set_end(encoder.end);
    return !encoder.impossible;
}

// Takes over the changed weights of a segment and counts their steps. False if they are not what the scan saw.
template <class T>
bool collect(const T* base, const T* fresh, const Scan& scan, const HazardTable& hazards, const Found& found,
             Changes<T>& changes, ValueCounts& counts) {
    changes.before.reserve(found.count);
    changes.after.reserve(found.count);
    T *const before = changes.before.end(), *const after = changes.after.end();
    bool still = true;
    for (size_t i = 0; i < found.count; i++) {
        const size_t at = found.positions[i];
        const T old = before[i] = base[at], now = after[i] = fresh[at];
        const uint8_t by = hazards.class_of_key[old >> hazards.field.mantissa_bits];
        still &= (old != now) & (by == scan.classes[at]);
        counts.step[by][step_value(old, now).symbol]++;
    }
    changes.before.set_end(before + found.count);
    changes.after.set_end(after + found.count);
    return still;
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

// How many runs of 2^run_log2 of `count` weights have one that differs if `changed` of them do, each as likely; in 2^-32.
uint64_t likely_touched(uint64_t changed, size_t count, int run_log2) {
    constexpr uint64_t kOne = 1ull << 32;
    uint64_t none = kOne - (changed << 32) / count;
    for (int i = 0; i < run_log2; i++) none = none == kOne ? kOne : none * none >> 32;
    return (kOne - none) * ((count + ((size_t)1 << run_log2) - 1) >> run_log2);
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
Counted encode_chunk(const T* base, const T* fresh, size_t count, Field field, const Sample& sample,
                     const Kernels& kernels, Workspace<T>& work, Trails& trails, std::vector<uint8_t>& out) {
    const bool none = std::all_of(sample.changed, sample.changed + kMaxKeys / 2, [](uint32_t k) { return k == 0; });
    Writer writer(out);
    if (none && same(base, fresh, count, trails)) {
        writer.varint(0);
        if (count > kSegment) writer.varint(0);
        return {};
    }
    Model model;
    model.field = field;
    choose_hazards(sample, model);
    const HazardTable hazards = make_hazards(model);
    work.clear();
    ValueCounts counts;
    uint64_t changes_of[2] = {0, 0};
    Counted counted;
    bool still = true;
    Scan scan;
    Found found;
    for (size_t i = 0; i < count; i += kSegment) {
        const size_t lane = i / kSegment & 1, here = std::min(kSegment, count - i);
        kernels.scan(base + i, fresh + i, here, hazards, scan);
        trails.reach(base + i + here, fresh + i + here);
        const Ahead ahead = {fresh + i + here, here == kSegment ? kBlock * sizeof(T) : 0};
        still &= encode_events(work.lanes[lane], scan, hazards, kernels, found, ahead);
        still &= collect(base + i, fresh + i, scan, hazards, found, work.changes, counts);
        changes_of[lane] += found.count;
        counted.runs += (uint64_t)bit_count(scan.dirty);
        counted.segments += found.count > 0;
    }
    if (!still) throw ArraysChanged();
    writer.varint(changes_of[0]);
    if (count > kSegment) writer.varint(changes_of[1]);
    if (changes_of[0] + changes_of[1] == 0) return {};  // what differed a moment ago does no more
    count_exponents(work.changes, model, counts);
    choose_values(counts, (int)sizeof(T) * 8, model);
    model.write(writer);
    write_streams(work, model, most_words(counts, model), out);
    counted.changed = changes_of[0] + changes_of[1];
    counted.likely_runs = likely_touched(counted.changed, count, 6);
    counted.likely_segments = likely_touched(counted.changed, count, 12);
    return counted;
}

template Counted encode_chunk(const uint8_t*, const uint8_t*, size_t, Field, const Sample&, const Kernels&,
                              Workspace<uint8_t>&, Trails&, std::vector<uint8_t>&);
template Counted encode_chunk(const uint16_t*, const uint16_t*, size_t, Field, const Sample&, const Kernels&,
                              Workspace<uint16_t>&, Trails&, std::vector<uint8_t>&);
template Counted encode_chunk(const uint32_t*, const uint32_t*, size_t, Field, const Sample&, const Kernels&,
                              Workspace<uint32_t>&, Trails&, std::vector<uint8_t>&);

}  // namespace weightcast
