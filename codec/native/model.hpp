// The model of one chunk: a hazard per class of old weights, and how the new values of a class are coded.
#pragma once

#include <vector>

#include "bytes.hpp"
#include "tables.hpp"

namespace weightcast {

constexpr int kClasses = 16;
constexpr int kFrequencyBits = 12;
constexpr int kFrequencyTotal = 1 << kFrequencyBits;
constexpr int kSymbols = 125;
constexpr int kEscape = 124;           // mode exponent: all bits of the new value follow
constexpr int kExponentSymbols = 124;  // mode exponent: 2 * (top - exponent) + sign flip, for 62 exponents

// step: the signed distance in units in the last place. exponent: the new exponent and mantissa, for weights so
// small that an update replaces them.
enum class Mode : uint8_t { step = 0, exponent = 1 };

// Magnitude - 1 of a step: 0..15 are symbols of their own, then four symbols an octave with raw bits below.
WC_INLINE int step_symbol(uint32_t m) {
    if (m < 16) return (int)m;
    const int octave = floor_log2(m);
    return 16 + (octave - 4) * 4 + (int)((m >> (octave - 2)) & 3);
}

WC_INLINE int step_raw_bits(int symbol) { return symbol < 16 ? 0 : (symbol >> 2) - 2; }

// The smallest magnitude - 1 of a symbol.
WC_INLINE uint32_t step_base(int symbol) {
    return symbol < 16 ? (uint32_t)symbol : (4u | (uint32_t)(symbol & 3)) << step_raw_bits(symbol);
}

struct ValueModel {
    Mode mode = Mode::step;
    uint8_t top = 0;   // mode exponent: the largest exponent that has a symbol
    uint8_t rest = 0;  // the symbol whose frequency is what the others leave, and is not written
    uint16_t frequency[kSymbols] = {};
    uint16_t cumulative[kSymbols + 1] = {};
    uint8_t first[kFrequencyTotal >> 2] = {};  // the symbol that owns slot 4 * index

    void finish();  // fills cumulative and first; frequencies sum to kFrequencyTotal

    int symbol_at(uint32_t slot) const {
        int s = first[slot >> 2];
        while (cumulative[s + 1] <= slot) s++;  // ends: the last cumulative is the total, above every slot
        return s;
    }
};

struct Model {
    Field field;
    uint8_t lowest = 0;               // exponents up to this one are class 0, then one class each, 15 the rest
    uint8_t code[kClasses] = {};      // hazard codes; 0: no weight of the class changes
    uint8_t value_of[kClasses] = {};  // index into values, meaningful where code is not 0
    std::vector<ValueModel> values;

    int keys() const { return 2 << field.exponent_bits; }
    int class_of_key(int key) const {
        const int exponent = key & ((1 << field.exponent_bits) - 1);
        const int c = exponent - lowest;
        return c < 0 ? 0 : c > kClasses - 1 ? kClasses - 1 : c;
    }

    void write(Writer& out) const;
    void read(Reader& in);  // leaves a model whose tables are in bounds, or a fault in the reader
};

// What the kernels look up.
struct HazardTable {
    uint8_t class_of_key[kMaxKeys];
    uint32_t by_class[kClasses];
    uint8_t plane[3][kClasses];  // bytes of by_class, lowest first
    uint8_t lowest;
    Field field;
};

HazardTable make_hazards(const Model& model);

}  // namespace weightcast
