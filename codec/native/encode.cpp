#include <algorithm>

#include "chunk.hpp"
#include "values.hpp"

namespace weightcast {
namespace {

// The sample is runs of this many weights, one in sample_stride(): memory is fast only along a line of addresses.
constexpr size_t kRun = 256;

size_t sample_stride(size_t count) { return std::clamp<size_t>(count >> 18, 1, 16); }

template <class T>
Sample take_sample(const T* base, const T* fresh, size_t count, Field field, const Kernels& kernels) {
    // Four counters, because neighbouring weights often share an exponent and would wait for each other's store.
    uint32_t seen[4][kMaxKeys] = {};
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
        size_t j = 0;
        for (; j + 4 <= here; j += 4)
            for (size_t part = 0; part < 4; part++) seen[part][base[i + j + part] >> field.mantissa_bits]++;
        for (; j < here; j++) seen[0][base[i + j] >> field.mantissa_bits]++;
    }
    for (size_t key = 0; key < kMaxKeys; key++)
        for (size_t part = 0; part < 4; part++) sample.seen[key & mask] += seen[part][key];
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

uint32_t* put_events(LaneEvents& lane, uint32_t* words, uint64_t states[2]) {
    const Interval* events = lane.events.data();
    size_t i = lane.used;
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
    return words;
}

void write_words(std::vector<uint8_t>& out, const uint32_t* begin, const uint32_t* end) {
    size_t at = out.size();
    out.resize(at + (size_t)(end - begin) * 4);
    for (; begin < end; begin++, at += 4) store_u32(out.data() + at, *begin);
}

// Encodes the three streams and appends states, lengths and words.
template <class T>
void write_streams(Workspace<T>& work, const Model& model, const uint64_t changes_of[2], std::vector<uint8_t>& out) {
    // Each stream ends where the one written before it begins. Room for a word per put, and one that is not kept.
    const size_t room = work.lanes[0].used + work.lanes[1].used + 3 * work.changes.before.size() + 1;
    work.words.clear();
    work.words.reserve(room);
    uint64_t states[3][2];
    std::fill(&states[0][0], &states[0][0] + 6, kStateLow);
    uint32_t* const end = work.words.data() + room;
    uint32_t* const values = put_values(work.changes, model, end, states[2]);
    uint32_t* const second = put_events(work.lanes[1], values, states[1]);
    uint32_t* const first = put_events(work.lanes[0], second, states[0]);
    const uint32_t* const edges[3] = {first, second, values};
    Writer writer(out);
    for (int s = 0; s < 3; s++) {
        if (s < 2 && !changes_of[s]) continue;
        writer.varint(states[s][0] - kStateLow);
        writer.varint(states[s][1] - kStateLow);
        if (s < 2) writer.varint((uint64_t)(edges[s + 1] - edges[s]));
    }
    write_words(out, first, end);
}

// Ends at the first segment that differs; the trail has reached it.
template <class T>
bool same(const T* base, const T* fresh, size_t count, Trail& trail) {
    for (size_t i = 0; i < count; i += kSegment) {
        const size_t here = std::min(kSegment, count - i);
        if (std::memcmp(base + i, fresh + i, here * sizeof(T))) return false;
        trail.reach(fresh + i + here);
    }
    return true;
}

}  // namespace

template <class T>
uint64_t encode_chunk(const T* base, const T* fresh, size_t count, Field field, const Kernels& kernels,
                      Workspace<T>& work, Trail& trail, std::vector<uint8_t>& out) {
    const Sample sample = take_sample(base, fresh, count, field, kernels);
    const bool none = std::all_of(sample.changed, sample.changed + kMaxKeys / 2, [](uint32_t k) { return k == 0; });
    Writer writer(out);
    if (none && same(base, fresh, count, trail)) {
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
        trail.reach(fresh + i + here);
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
    write_streams(work, model, changes_of, out);
    return changes_of[0] + changes_of[1];
}

template uint64_t encode_chunk(const uint8_t*, const uint8_t*, size_t, Field, const Kernels&, Workspace<uint8_t>&,
                               Trail&, std::vector<uint8_t>&);
template uint64_t encode_chunk(const uint16_t*, const uint16_t*, size_t, Field, const Kernels&, Workspace<uint16_t>&,
                               Trail&, std::vector<uint8_t>&);
template uint64_t encode_chunk(const uint32_t*, const uint32_t*, size_t, Field, const Kernels&, Workspace<uint32_t>&,
                               Trail&, std::vector<uint8_t>&);

}  // namespace weightcast
