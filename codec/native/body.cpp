#include <algorithm>

#include "chunk.hpp"
#include "sample.hpp"
#include "spares.hpp"

namespace weightcast {
namespace {

constexpr uint8_t kModel = 0;       // low four bits of the first byte; the high four are flags, none defined yet
constexpr int kSmallestChunk = 12;  // log2 of weights: one segment

size_t chunks_of(size_t count, int chunk_log2) {
    return (count >> chunk_log2) + ((count & (((size_t)1 << chunk_log2) - 1)) != 0);
}

template <class T>
Counted encode_chunks(const T* base, const T* fresh, size_t count, Field field, const Kernels& kernels, Trails trails,
                      std::vector<uint8_t>& out) {
    const Survey survey = take_survey(base, fresh, count, field, kernels);
    const int chunk_log2 = choose_chunk(survey);
    const size_t chunk = (size_t)1 << chunk_log2, chunks = chunks_of(count, chunk_log2);
    out.push_back(kModel);
    out.push_back((uint8_t)chunk_log2);
    Spare<Workspace<T>> spare;
    Workspace<T>& work = *spare;
    std::vector<uint8_t> several;
    std::vector<uint8_t>& bodies = chunks > 1 ? several : out;
    std::vector<size_t> ends;
    Counted all;
    for (size_t i = 0; i < count; i += chunk) {
        const size_t n = std::min(chunk, count - i), stride = sample_stride(n);
        const Sample sample =
            stride == survey.stride ? survey.sum(i, n) : take_sample(base, fresh, i, n, stride, field, kernels);
        all += encode_chunk(base + i, fresh + i, n, field, sample, kernels, work, trails, bodies);
        ends.push_back(bodies.size());
    }
    Writer writer(out);
    for (size_t i = 0; i + 1 < chunks; i++) writer.varint(ends[i] - (i ? ends[i - 1] : 0));
    out.insert(out.end(), several.begin(), several.end());
    return all;
}

// A chunk's bytes in a body.
struct Part {
    const uint8_t* at;
    size_t size;
};

// The parts of a body. The table is at most as long as the body, so nothing is allocated that was not sent.
Fault split(const uint8_t* body, size_t size, size_t count, int& chunk_log2, std::vector<Part>& parts) {
    Reader in(body, body + size);
    const uint8_t version = in.byte();
    if (in.failed()) return in.fault();
    if (version != kModel) return Fault::unsupported;
    chunk_log2 = in.byte();
    if (in.failed()) return in.fault();
    if (chunk_log2 < kSmallestChunk || chunk_log2 > kLargestChunk) return Fault::corrupt;
    const size_t chunks = chunks_of(count, chunk_log2);
    if (chunks > in.left()) return Fault::truncated;  // every chunk has at least one byte
    if (chunks == 0) return in.left() ? Fault::corrupt : Fault::none;
    std::vector<size_t> sizes;
    for (size_t i = 0; i + 1 < chunks; i++) sizes.push_back(in.varint());
    for (const size_t s : sizes) parts.push_back({in.take(s), s});
    const size_t last = in.left();
    parts.push_back({in.take(last), last});
    return in.fault();
}

template <class T>
Fault decode_parts(const T* base, size_t count, Field field, const std::vector<Part>& parts, int chunk_log2,
                   const Kernels& kernels, uint32_t* index, T* bits, Sink* sink, uint64_t left) {
    const size_t chunk = (size_t)1 << chunk_log2;
    for (size_t i = 0; i < parts.size(); i++) {
        const size_t from = i << chunk_log2, n = std::min(chunk, count - from);
        uint64_t changes = 0;
        Fault fault = chunk_changes(parts[i].at, parts[i].size, n, changes);
        if (fault == Fault::none && changes > left) fault = Fault::corrupt;
        if (fault != Fault::none) return fault;
        fault = decode_chunk<T>({base + from, n, from, index, bits, changes, sink}, field, kernels, parts[i].at,
                                parts[i].size);
        if (fault != Fault::none) return fault;
        index += changes;
        bits += changes;
        left -= changes;
    }
    return left ? Fault::corrupt : Fault::none;
}

// Calls with a 0 of the unsigned type of this width in bytes.
template <class Call>
auto with_width(int width, Call call) {
    if (width == 1) return call(uint8_t{});
    if (width == 2) return call(uint16_t{});
    return call(uint32_t{});
}

}  // namespace

bool is_supported(const Dtype& d) {
    const Field& f = d.field;
    return (d.width == 1 || d.width == 2 || d.width == 4) && f.exponent_bits >= 2 && f.exponent_bits <= 8 &&
           f.mantissa_bits >= 1 && 1 + f.exponent_bits + f.mantissa_bits == d.width * 8;
}

void Counted::operator+=(const Counted& more) {
    changed += more.changed;
    runs += more.runs;
    segments += more.segments;
    likely_runs += more.likely_runs;
    likely_segments += more.likely_segments;
}

bool Counted::clustered() const {
    const auto fewer = [](uint64_t there, uint64_t likely) { return there * 10 < (likely >> 32) * 9; };
    return fewer(runs, likely_runs) || fewer(segments, likely_segments);
}

Counted encode_body(const void* base, const void* fresh, size_t count, const Dtype& dtype, bool portable,
                    std::vector<uint8_t>& out, Digests* digests) {
    const Trails trails = {{digests ? digests->of_base.get() : nullptr, base},
                           {digests ? digests->of_result.get() : nullptr, fresh}};
    const Kernels& k = kernels(dtype.width, portable);
    return with_width(dtype.width, [&](auto zero) {
        using T = decltype(zero);
        return encode_chunks((const T*)base, (const T*)fresh, count, dtype.field, k, trails, out);
    });
}

Fault count_changes(const uint8_t* body, size_t size, size_t count, uint64_t& changes) {
    int chunk_log2 = 0;
    std::vector<Part> parts;
    const Fault fault = split(body, size, count, chunk_log2, parts);
    if (fault != Fault::none) return fault;
    changes = 0;
    for (size_t i = 0; i < parts.size(); i++) {
        const size_t from = i << chunk_log2;
        uint64_t here = 0;
        const Fault f =
            chunk_changes(parts[i].at, parts[i].size, std::min((size_t)1 << chunk_log2, count - from), here);
        if (f != Fault::none) return f;
        changes += here;
    }
    return Fault::none;
}

Fault decode_body(const void* base, size_t count, const Dtype& dtype, const uint8_t* body, size_t size, bool portable,
                  uint32_t* index, void* bits, uint64_t changes, Sink* sink) {
    int chunk_log2 = 0;
    std::vector<Part> parts;
    const Fault fault = split(body, size, count, chunk_log2, parts);
    if (fault != Fault::none) return fault;
    const Kernels& k = kernels(dtype.width, portable);
    return with_width(dtype.width, [&](auto zero) {
        using T = decltype(zero);
        return decode_parts((const T*)base, count, dtype.field, parts, chunk_log2, k, index, (T*)bits, sink, changes);
    });
}

}  // namespace weightcast
