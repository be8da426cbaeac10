#include "cases.hpp"
#include "chunk.hpp"

namespace weightcast {
namespace {

// Some weights of a case, one after the other.
struct Weights {
    const uint8_t *base, *fresh;
    size_t count;
    Dtype dtype;

    size_t width() const { return (size_t)dtype.width; }
    bool changes(size_t i) const { return std::memcmp(base + i * width(), fresh + i * width(), width()); }
};

// Every symbol has a frequency: what comes is written whatever it is, in mode exponent also by an escape.
ValueModel draw_value_model(Random& random, Field field) {
    ValueModel v;
    v.mode = (Mode)below(random, 2);
    if (v.mode == Mode::exponent) v.top = (uint8_t)below(random, uint64_t{1} << field.exponent_bits);
    const size_t symbols = v.mode == Mode::step ? kSymbols - 1 : kSymbols;
    v.rest = (uint8_t)below(random, symbols);
    int rest = kFrequencyTotal;
    for (size_t s = 0; s < symbols; s++) {
        if (s == v.rest) continue;
        v.frequency[s] = (uint16_t)(1 + below(random, 15));  // four significant bits, as the header holds them
        rest -= v.frequency[s];
    }
    v.frequency[v.rest] = (uint16_t)rest;
    v.finish();
    return v;
}

// Hazards of any size where weights change, and of many classes in which none does.
Model draw_model(const Weights& w, Random& random) {
    Model model;
    const Field field = model.field = w.dtype.field;
    model.lowest = (uint8_t)below(random, uint64_t{1} << field.exponent_bits);
    bool changes[kClasses] = {};
    for (size_t i = 0; i < w.count; i++)
        if (w.changes(i)) changes[model.class_of_key((int)(load(w.base, i, w.width()) >> field.mantissa_bits))] = true;
    const uint64_t least = below(random, 2) ? 1 : kHazardCodes - 40;
    for (int c = 0; c < kClasses; c++) {
        if (!changes[c] && below(random, 2)) continue;
        model.code[c] = (uint8_t)(least + below(random, kHazardCodes - least));
        if (model.values.empty() || below(random, 2)) model.values.push_back(draw_value_model(random, field));
        model.value_of[c] = (uint8_t)(model.values.size() - 1);
    }
    return model;
}

// A stream's states and words; the words lie at the end of `room`.
struct Coded {
    uint64_t states[2] = {kStateLow, kStateLow};
    std::vector<uint32_t> room;
    const uint32_t* begin = nullptr;

    size_t words() const { return (size_t)(room.data() + room.size() - begin); }
};

Coded code_events(const std::vector<Interval>& events, size_t used) {
    Coded coded;
    coded.room.resize(used + 1);
    uint32_t* words = coded.room.data() + coded.room.size();
    for (size_t i = used; i--;) rans_put(coded.states[i & 1], words, events[i].start, events[i].width, kSurvivalBits);
    coded.begin = words;
    return coded;
}

template <class T>
Coded code_values(const Weights& w, const std::vector<size_t>& changed, const Model& model) {
    Changes<T> changes;
    changes.before.reserve(changed.size());
    changes.after.reserve(changed.size());
    T *before = changes.before.end(), *after = changes.after.end();
    for (const size_t i : changed) {
        *before++ = (T)load(w.base, i, sizeof(T));
        *after++ = (T)load(w.fresh, i, sizeof(T));
    }
    changes.before.set_end(before);
    changes.after.set_end(after);
    Coded coded;
    coded.room.resize(3 * changed.size() + 1);
    coded.begin = put_values(changes, model, coded.room.data() + coded.room.size(), coded.states);
    return coded;
}

Coded code_values(const Weights& w, const std::vector<size_t>& changed, const Model& model) {
    if (w.width() == 1) return code_values<uint8_t>(w, changed, model);
    if (w.width() == 2) return code_values<uint16_t>(w, changed, model);
    return code_values<uint32_t>(w, changed, model);
}

void write_streams(Writer& writer, const Coded (&streams)[3], const uint64_t (&changes_of)[2],
                   std::vector<uint8_t>& out) {
    for (size_t i = 0; i < 3; i++) {
        if (i < 2 && !changes_of[i]) continue;
        for (const uint64_t state : streams[i].states) writer.varint(state - kStateLow);
        if (i < 2) writer.varint(streams[i].words());
    }
    for (const Coded& stream : streams) {
        for (size_t i = 0; i < stream.words(); i++) {
            out.resize(out.size() + 4);
            store_u32(out.data() + out.size() - 4, stream.begin[i]);
        }
    }
}

// Appends the chunk.
void write_chunk(const Weights& w, Random& random, std::vector<uint8_t>& out) {
    const Model model = draw_model(w, random);
    const HazardTable hazards = make_hazards(model);
    const Kernels& k = portable_kernels(w.dtype.width);
    std::vector<Interval> events[2];
    LaneEncoder lanes[2];
    for (size_t i = 0; i < 2; i++) {
        events[i].resize((w.count / kSegment + 1) * kMostEvents);
        lanes[i] = {0, events[i].data(), events[i].data(), false};
    }
    std::vector<size_t> changed;
    uint64_t changes_of[2] = {0, 0};
    static Scan scan;
    static Found found;
    for (size_t i = 0; i < w.count; i += kSegment) {
        const size_t lane = i / kSegment & 1, at = i * w.width();
        k.scan(w.base + at, w.fresh + at, std::min(kSegment, w.count - i), hazards, scan);
        k.encode(lanes[lane], scan, hazards, found, {nullptr, 0});
        changes_of[lane] += found.count;
        for (size_t j = 0; j < found.count; j++) changed.push_back(i + found.positions[j]);
    }
    Writer writer(out);
    writer.varint(changes_of[0]);
    if (w.count > kSegment) writer.varint(changes_of[1]);
    if (changed.empty()) return;
    model.write(writer);
    write_streams(writer,
                  {code_events(events[0], (size_t)(lanes[0].used - events[0].data())),
                   code_events(events[1], (size_t)(lanes[1].used - events[1].data())), code_values(w, changed, model)},
                  changes_of, out);
}

}  // namespace

std::vector<uint8_t> foreign_body(const Case& c, Random& random) {
    const int chunk_log2 = 12 + (int)below(random, 13);
    const size_t chunk = size_t{1} << chunk_log2, width = (size_t)c.dtype.width;
    std::vector<uint8_t> out = {0, (uint8_t)chunk_log2}, chunks;
    Writer writer(out);
    for (size_t i = 0, from = 0; i < c.count; i += chunk, from = chunks.size()) {
        const size_t n = std::min(chunk, c.count - i);
        write_chunk({c.base.get() + i * width, c.fresh.get() + i * width, n, c.dtype}, random, chunks);
        if (i + n < c.count) writer.varint(chunks.size() - from);
    }
    out.insert(out.end(), chunks.begin(), chunks.end());
    return out;
}

}  // namespace weightcast
