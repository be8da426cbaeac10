#include "model.hpp"

namespace weightcast {
namespace {

// The bits after the first that a frequency keeps; more would cost more than they gain.
constexpr int kKept = 3;

void write_frequencies(Writer& out, const ValueModel& v) {
    int last = kSymbols - 1;
    while (v.frequency[last] == 0) last--;
    out.bits((uint32_t)last, 7);
    out.bits(v.rest, 7);
    for (int s = 0; s <= last; s++) {
        if (s == v.rest) continue;
        const uint32_t f = v.frequency[s];
        const int bits = f ? floor_log2(f) + 1 : 0, dropped = bits - 1 > kKept ? bits - 1 - kKept : 0;
        out.gamma((uint32_t)bits + 1);
        if (bits > 1) out.bits((f >> dropped) & ((1u << (bits - 1 - dropped)) - 1), bits - 1 - dropped);
    }
}

void read_frequencies(Reader& in, ValueModel& v, int symbols) {
    const int last = (int)in.bits(7);
    v.rest = (uint8_t)in.bits(7);
    if (last >= symbols || v.rest > last) return in.fail(Fault::corrupt);
    int left = kFrequencyTotal;
    for (int s = 0; s <= last; s++) {
        if (s == v.rest) continue;
        const int bits = (int)in.gamma(3) - 1;
        if (bits > kFrequencyBits) return in.fail(Fault::corrupt);
        const int dropped = bits - 1 > kKept ? bits - 1 - kKept : 0;
        if (bits) v.frequency[s] = (uint16_t)((1u << (bits - 1 - dropped) | in.bits(bits - 1 - dropped)) << dropped);
        left -= v.frequency[s];
        if (left < 1) return in.fail(Fault::corrupt);
    }
    v.frequency[v.rest] = (uint16_t)left;
}

}  // namespace

void ValueModel::finish() {
    uint32_t sum = 0;
    for (int s = 0; s < kSymbols; s++) {
        cumulative[s] = (uint16_t)sum;
        for (uint32_t slot = (sum + 3) & ~3u; slot < sum + frequency[s]; slot += 4) first[slot >> 2] = (uint8_t)s;
        sum += frequency[s];
    }
    cumulative[kSymbols] = (uint16_t)sum;
}

void Model::write(Writer& out) const {
    int low = 0, high = kClasses - 1;
    while (!code[low]) low++;  // a chunk with a change has a class with a hazard
    while (!code[high]) high--;
    out.bits(lowest, 8);
    out.bits((uint32_t)low, 4);
    out.bits((uint32_t)high, 4);
    for (int c = low; c <= high; c++) out.bits(code[c], 8);
    int written = 0;
    for (int c = low; c <= high; c++) {
        if (!code[c]) continue;
        const bool again = value_of[c] < written;
        if (written) out.bits(again, 1);
        if (again) continue;
        const ValueModel& v = values[value_of[c]];
        out.bits((uint32_t)v.mode, 1);
        if (v.mode == Mode::exponent) out.bits(v.top, 8);
        write_frequencies(out, v);
        written++;
    }
    out.align();
}

void Model::read(Reader& in) {
    lowest = (uint8_t)in.bits(8);
    const int low = (int)in.bits(4), high = (int)in.bits(4);
    if (lowest >= 1 << field.exponent_bits || low > high) return in.fail(Fault::corrupt);
    for (int c = low; c <= high; c++) {
        code[c] = (uint8_t)in.bits(8);
        if (code[c] >= kHazardCodes) return in.fail(Fault::corrupt);
    }
    if (!code[low] || !code[high]) return in.fail(Fault::corrupt);
    values.reserve(kClasses);
    for (int c = low; c <= high && !in.failed(); c++) {
        if (!code[c]) continue;
        if (values.empty() || !in.bits(1)) {
            values.emplace_back();
            ValueModel& v = values.back();
            v.mode = (Mode)in.bits(1);
            if (v.mode == Mode::exponent) v.top = (uint8_t)in.bits(8);
            if (v.top >= 1 << field.exponent_bits) return in.fail(Fault::corrupt);
            read_frequencies(in, v, v.mode == Mode::step ? kSymbols - 1 : kSymbols);
            if (in.failed()) return;
            v.finish();
        }
        value_of[c] = (uint8_t)(values.size() - 1);
    }
    in.align();
}

HazardTable make_hazards(const Model& model) {
    HazardTable t;
    t.lowest = model.lowest;
    t.field = model.field;
    for (int c = 0; c < kClasses; c++) {
        t.by_class[c] = hazard_of_code(model.code[c]);
        for (int byte = 0; byte < 3; byte++) t.plane[byte][c] = (uint8_t)(t.by_class[c] >> (8 * byte));
    }
    for (int key = 0; key < kMaxKeys; key++)
        t.class_of_key[key] = (uint8_t)model.class_of_key(key & (model.keys() - 1));
    return t;
}

}  // namespace weightcast
