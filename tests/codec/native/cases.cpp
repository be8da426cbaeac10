#include "cases.hpp"

#include "sample.hpp"

namespace weightcast {
namespace {

void store(uint8_t* weights, size_t i, size_t width, uint32_t w) {
    std::memcpy(weights + i * width, &w, width);
}

// A weight of this exponent.
uint32_t with_exponent(Random& random, const Dtype& d, uint32_t exponent) {
    const uint32_t w = (uint32_t)random();
    const int mantissa = d.field.mantissa_bits;
    return (w & ((1u << mantissa) - 1)) | exponent << mantissa | (w >> 31) << (d.width * 8 - 1);
}

// As most are: in a few exponents, each half as frequent as the one above.
uint32_t usual(Random& random, const Dtype& d) {
    return with_exponent(random, d, (1u << d.field.exponent_bits) / 2 - (uint32_t)lowest_bit(random() | 1 << 9));
}

// So small that an update replaces it.
uint32_t tiny(Random& random, const Dtype& d) {
    return with_exponent(random, d, (uint32_t)below(random, (uint64_t{1} << d.field.exponent_bits) * 5 / 32));
}

Case of_size(const Dtype& dtype, size_t count) {
    Case c = {dtype, count, nullptr, nullptr};
    c.base.reset(new uint8_t[c.bytes()]);
    c.fresh.reset(new uint8_t[c.bytes()]);
    return c;
}

}  // namespace

void fail(const char* what, uint64_t seed) {
    std::fprintf(stderr, "%s, case seed %llu\n", what, (unsigned long long)seed);
    std::abort();
}

Case draw(Random& random) {
    static const size_t counts[] = {0, 1, 7, 8, 9, 255, 256, 257, 1000, 4095, 4096, 4097, 8192, 8193, 12289, 20001};
    const Dtype& dtype = kDtypes[below(random, 5)];
    Case c = of_size(dtype, below(random, 2) ? counts[below(random, 16)] : below(random, 9000));
    const uint64_t kind = below(random, 4);
    const bool any = kind == 0, overtaken = kind == 1;
    const size_t width = (size_t)dtype.width;
    for (size_t i = 0; i < c.count; i++)
        store(c.base.get(), i, width,
              any                      ? (uint32_t)random()
              : overtaken && i % 3 < 1 ? tiny(random, dtype)
                                       : usual(random, dtype));
    std::copy(c.base.get(), c.base.get() + c.bytes(), c.fresh.get());
    const uint64_t one_in = uint64_t{1} << below(random, 13);
    for (size_t i = 0; i < c.count; i++) {
        if (overtaken && i % 3 < 1 && below(random, 4) == 0) {
            store(c.fresh.get(), i, width, below(random, 16) ? usual(random, dtype) : tiny(random, dtype));
            continue;
        }
        if (below(random, one_in)) continue;
        const uint32_t w = load(c.fresh.get(), i, width);
        store(c.fresh.get(), i, width,
              below(random, 9) ? w + 1 - 2 * (uint32_t)below(random, 2) : (uint32_t)random());
    }
    return c;
}

Case draw_large(Random& random, const Dtype& dtype) {
    Case c = of_size(dtype, 2 * kPart + 1 + below(random, 20000));
    const size_t width = (size_t)dtype.width;
    for (size_t i = 0; i < c.count; i++) store(c.base.get(), i, width, usual(random, dtype));
    std::copy(c.base.get(), c.base.get() + c.bytes(), c.fresh.get());
    for (size_t i = 0; i < c.count; i += 1 + below(random, 16))
        if (i / kPart != 1 && i / kSegment % 2)
            store(c.fresh.get(), i, width, load(c.base.get(), i, width) + 1);
    return c;
}

void digest_of(const uint8_t* data, size_t size, uint8_t out[16]) {
    Digest d;
    d.update(data, size);
    d.finish(out);
}

bool decode(const Case& c, const std::vector<uint8_t>& bytes, bool portable, std::vector<uint8_t>& out,
            uint8_t digest[16]) {
    const std::unique_ptr<uint8_t[]> body(new uint8_t[bytes.size()]);
    std::copy(bytes.begin(), bytes.end(), body.get());
    uint64_t changes = 0;
    if (count_changes(body.get(), bytes.size(), c.count, changes) != Fault::none) return false;
    if (changes > c.count) std::abort();
    const std::unique_ptr<uint32_t[]> index(new uint32_t[changes]);
    const std::unique_ptr<uint32_t[]> bits(new uint32_t[changes]);  // aligned for every width
    Digests digests(true, true);
    Patched sink(c.base.get(), c.dtype.width, digests);
    if (decode_body(c.base.get(), c.count, c.dtype, body.get(), bytes.size(), portable, index.get(), bits.get(),
                    changes, &sink) != Fault::none)
        return false;
    digests.of_base->finish(digest);
    uint8_t of_base[16];
    digest_of(c.base.get(), c.bytes(), of_base);
    if (std::memcmp(digest, of_base, 16)) std::abort();
    digests.of_result->finish(digest);
    out.assign(c.base.get(), c.base.get() + c.bytes());
    if (!scatter(out.data(), c.count, c.dtype.width, index.get(), bits.get(), changes)) std::abort();
    return true;
}

void check_bad_body(const Case& c, const std::vector<uint8_t>& bad, uint64_t seed) {
    std::vector<uint8_t> out, portable_out;
    uint8_t wanted[16], digest[16], portable_digest[16];
    const bool accepted = decode(c, bad, false, out, digest);
    if (accepted != decode(c, bad, true, portable_out, portable_digest))
        fail("the kernels disagree on a bad body", seed);
    if (!accepted) return;
    if (out != portable_out || std::memcmp(digest, portable_digest, 16))
        fail("the kernels decode a bad body differently", seed);
    digest_of(out.data(), out.size(), wanted);
    if (std::memcmp(digest, wanted, 16)) fail("the digest is not that of the result", seed);
}

}  // namespace weightcast
