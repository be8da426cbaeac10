// Scanning and comparing, compiled once per vector instruction set inside that set's namespace, which has to provide
//   Lookup, make_lookup(hazards)                   as lanes.inl wants them
//   Classifier, make_classifier(hazards, width)     how exponents become classes
//   scan_block(weights, classifier, lookup, sums, classes)  the hazard sums and the classes of kBlock weights
//   equal64(a, b)                                   bit i: whether weight i of 64 is the same
// and nothing that the linker could merge with another set's copy (see common.hpp).

// How many bytes ahead memory is asked for: the hardware's own prefetching stops at each 4 KiB page, and it does not
// see that the next segment follows the work on this one.
constexpr size_t kAhead = 8192;

template <class T>
void scan(const void* before, const void* after, size_t count, const HazardTable& hazards, Scan& out) {
    if (count % kBlock) return portable_kernels(sizeof(T)).scan(before, after, count, hazards, out);
    const T *w = (const T*)before, *fresh = (const T*)after;
    const Lookup k = make_lookup(hazards);
    const Classifier by = make_classifier(hazards, sizeof(T));
    out.blocks = count / kBlock;
    out.dirty = 0;
    for (size_t b = 0; b < out.blocks; b++, w += kBlock) {
        for (size_t line = 0; line < kBlock * sizeof(T); line += 64) prefetch(w, kAhead + line);
        if (fresh) {
            for (size_t i = 4 * b, at = 0; at < kBlock; i++, at += 64) {
                out.masks[i] = ~equal64(w + at, fresh + at);
                out.dirty |= (uint64_t)(out.masks[i] != 0) << i;
            }
            fresh += kBlock;
        }
        scan_block(w, by, k, out.sums[b], out.classes + b * kBlock);
    }
}

template <class T>
void diff(const void* a, const void* b, size_t count, uint64_t* masks) {
    const T *x = (const T*)a, *y = (const T*)b;
    for (; count >= 64; count -= 64, x += 64, y += 64) *masks++ = ~equal64(x, y);
    if (count) portable_kernels(sizeof(T)).diff(x, y, count, masks);
}
