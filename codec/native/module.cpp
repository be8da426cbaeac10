// The only file that knows Python: converts arguments, releases the GIL, turns faults into a name that codec/ulp.py
// raises. Callers in codec/ pass arrays that they have checked; what is checked again here keeps memory safe.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

#include "patch.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weightcast;

namespace {

using Source = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;  // any array, viewed as bytes
using Index = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Target = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* sentence) {
    if (!holds) throw nb::value_error(sentence);
}

Dtype dtype_of(int exponent_bits, int mantissa_bits) {
    const Dtype d = {(1 + exponent_bits + mantissa_bits) / 8, {exponent_bits, mantissa_bits}};
    require(is_supported(d), "ulp_v1 does not code this dtype");
    return d;
}

nb::bytes to_bytes(const void* data, size_t size) { return nb::bytes(static_cast<const char*>(data), size); }

// The body, how many elements differ, and whether they are clustered; or "changed" if somebody wrote into the arrays
// meanwhile.
nb::object ulp_encode(const Source& base, const Source& fresh, int exponent_bits, int mantissa_bits, bool portable,
                      Digests* digests) {
    const Dtype d = dtype_of(exponent_bits, mantissa_bits);
    require(base.size() == fresh.size() && base.size() % (size_t)d.width == 0, "base and new differ in size");
    std::vector<uint8_t> body;
    Counted counted;
    try {
        nb::gil_scoped_release unlocked;
        counted = encode_body(base.data(), fresh.data(), base.size() / (size_t)d.width, d, portable, body, digests);
    } catch (const ArraysChanged&) {
        return nb::str("changed");
    }
    return nb::make_tuple(to_bytes(body.data(), body.size()), counted.changed, counted.clustered());
}

const char* name_of(Fault fault) {
    return fault == Fault::truncated ? "truncated" : fault == Fault::unsupported ? "unsupported" : "corrupt";
}

// Number of changes a body holds, or why it was refused.
nb::object ulp_changes(const Source& body, size_t count) {
    uint64_t changes = 0;
    const Fault fault = count_changes(body.data(), body.size(), count, changes);
    if (fault != Fault::none) return nb::str(name_of(fault));
    return nb::int_(changes);
}

// Fills index and bits, which have room for what ulp_changes said; None, or why the body was refused.
nb::object ulp_decode(const Source& base, const Source& body, int exponent_bits, int mantissa_bits,
                      const nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& index,
                      const Target& bits, bool portable, Digests* digests) {
    const Dtype d = dtype_of(exponent_bits, mantissa_bits);
    const size_t width = (size_t)d.width;
    require(base.size() % width == 0 && bits.size() == index.size() * width, "index and bits differ in size");
    Fault fault;
    {
        nb::gil_scoped_release unlocked;
        std::optional<Patched> sink;
        if (digests && digests->any()) sink.emplace(base.data(), d.width, *digests);
        fault = decode_body(base.data(), base.size() / width, d, body.data(), body.size(), portable, index.data(),
                            bits.data(), index.size(), sink ? &*sink : nullptr);
    }
    if (fault != Fault::none) return nb::str(name_of(fault));
    return nb::none();
}

void require_width(int width) { require(width == 1 || width == 2 || width == 4 || width == 8, "unknown item size"); }

uint64_t changed_count(const Source& a, const Source& b, int width) {
    require_width(width);
    require(a.size() == b.size() && a.size() % (size_t)width == 0, "the arrays differ in size");
    nb::gil_scoped_release unlocked;
    return count_changed(a.data(), b.data(), a.size() / (size_t)width, width);
}

void store_changes(const Target& buffer, int width, const Index& index, const Source& bits) {
    require_width(width);
    require(bits.size() == index.size() * (size_t)width, "index and bits differ in size");
    bool fits;
    {
        nb::gil_scoped_release unlocked;
        fits = scatter(buffer.data(), buffer.size() / (size_t)width, width, index.data(), bits.data(), index.size());
    }
    require(fits, "the indices do not ascend within the buffer");
}

void add_patched(Digests& digests, const Source& base, int width, const Index& index, const Source& bits) {
    require_width(width);
    require(bits.size() == index.size() * (size_t)width, "index and bits differ in size");
    bool fits;
    {
        nb::gil_scoped_release unlocked;
        fits = digest_patched(base.data(), base.size() / (size_t)width, width, index.data(), bits.data(), index.size(),
                              digests);
    }
    require(fits, "the indices do not ascend within the base");
}

void add_both(Digests& digests, const Source& base, const Source& result) {
    require(!digests.of_base || base.size() == result.size(), "base and result differ in size");
    nb::gil_scoped_release unlocked;
    digest_both(base.data(), base.size(), result.data(), result.size(), digests);
}

nb::bytes digest_of(const std::unique_ptr<Digest>& digest) {
    require(digest != nullptr, "this digest was not asked for");
    uint8_t out[kDigestBytes];
    digest->finish(out);
    return to_bytes(out, kDigestBytes);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "weightcast codec kernels: arrays as bytes, every heavy loop without the GIL";
    m.def("ulp_encode", &ulp_encode, "base"_a, "new"_a, "exponent_bits"_a, "mantissa_bits"_a, "portable"_a,
          "digests"_a.none());
    m.def("ulp_changes", &ulp_changes, "body"_a, "count"_a);
    m.def("ulp_decode", &ulp_decode, "base"_a, "body"_a, "exponent_bits"_a, "mantissa_bits"_a, "index"_a, "bits"_a,
          "portable"_a, "digests"_a.none());
    m.def("count_changed", &changed_count, "a"_a, "b"_a, "item_bytes"_a);
    m.def("scatter", &store_changes, "buffer"_a, "item_bytes"_a, "index"_a, "bits"_a);
    nb::set_leak_warnings(false);  // a thread that is still coding at exit is no leak
    nb::class_<Digests>(m, "Digests")
        .def(nb::init<bool, bool>(), "base"_a, "result"_a)
        .def("add_patched", &add_patched, "base"_a, "item_bytes"_a, "index"_a, "bits"_a)
        .def("add", &add_both, "base"_a, "result"_a)
        .def("base", [](const Digests& d) { return digest_of(d.of_base); })
        .def("result", [](const Digests& d) { return digest_of(d.of_result); });
}
