// Included inside an instruction set's namespace, after xxhash.h with XXH_INLINE_ALL.

static XXH3_state_t& state_of(DigestState& s) {
    static_assert(sizeof(XXH3_state_t) <= sizeof(DigestState), "room for xxHash's state");
    static_assert(alignof(XXH3_state_t) <= alignof(DigestState), "alignment of xxHash's state");
    return *reinterpret_cast<XXH3_state_t*>(s.opaque);
}

static void reset(DigestState& s) {
    XXH3_INITSTATE(&state_of(s));
    XXH3_128bits_reset(&state_of(s));
}

static void update(DigestState& s, const void* data, size_t size) {
    if (size) XXH3_128bits_update(&state_of(s), data, size);
}

static void finish(const DigestState& s, uint8_t out[kDigestBytes]) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state_of(const_cast<DigestState&>(s))));
    std::memcpy(out, canonical.digest, kDigestBytes);
}

constexpr DigestFunctions kFunctions = {reset, update, finish};
