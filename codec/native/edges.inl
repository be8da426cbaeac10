// The hazards within a group of 8 weights, one weight after the other, for sets in which that is the fastest way:
// group_edges() and locate() as lanes.inl wants them, from a Lookup with the HazardTable's `by_class`.

WC_INLINE void group_edges(const uint8_t* classes, const Lookup& k, uint32_t low, uint32_t edge[9]) {
    edge[0] = low;
    for (size_t i = 0; i < 8; i++) edge[i + 1] = edge[i] + k.by_class[classes[i]];
}

WC_INLINE size_t locate(const uint8_t* classes, const Lookup& k, uint32_t low, uint32_t target, uint32_t edge[9]) {
    group_edges(classes, k, low, edge);
    size_t n = 0;
    for (size_t i = 1; i < 8; i++) n += edge[i] <= target;
    return n;
}
