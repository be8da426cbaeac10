// A libFuzzer target: two bytes choose a base, the rest is a body of ulp_v1 for it.
//
// With WEIGHTCAST_SEEDS=FOLDER in the environment it writes a valid input for each base there, and ends.
#include <fstream>
#include <map>
#include <string>

#include "hostile.hpp"

using namespace weightcast;

namespace {

constexpr uint64_t kBases = 256;

struct Known {
    Case c;
    std::vector<uint8_t> body;
};

// The base of a number, and the body of what follows it; made once.
const Known& base_of(uint64_t seed) {
    static std::map<uint64_t, Known> made;
    const auto found = made.find(seed);
    if (found != made.end()) return found->second;
    Random random(seed);
    Known known{draw(random), {}};
    encode_body(known.c.base.get(), known.c.fresh.get(), known.c.count, known.c.dtype, false, known.body);
    return made.emplace(seed, std::move(known)).first->second;
}

void write_seeds(const std::string& folder) {
    for (uint64_t seed = 0; seed < kBases; seed++) {
        const Known& known = base_of(seed);
        if (known.body.size() > 4000) continue;
        std::ofstream file(folder + "/seed-" + std::to_string(seed), std::ios::binary);
        file.put((char)seed).put((char)(seed >> 8));
        file.write((const char*)known.body.data(), (std::streamsize)known.body.size());
    }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    if (const char* folder = std::getenv("WEIGHTCAST_SEEDS")) {
        write_seeds(folder);
        std::exit(0);
    }
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 2) return -1;
    const uint64_t seed = (data[0] | (uint64_t)data[1] << 8) % kBases;
    check_bad_body(base_of(seed).c, std::vector<uint8_t>(data + 2, data + size), seed);
    return 0;
}
