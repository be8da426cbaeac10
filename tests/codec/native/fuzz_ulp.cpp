// A libFuzzer target: two bytes choose a base, the rest is a body of ulp_v1 for it.
//
// With WEIGHTCAST_SEEDS=FOLDER in the environment it writes a valid input for each base there, and ends. Compiled without
// -DWEIGHTCAST_LIBFUZZER it is a program of its own, for any compiler: `fuzz_ulp FILE...` runs those inputs, `fuzz_ulp`
// alone all seeds, whole and with each of their first bytes damaged.
#include <string>

#include "cases.hpp"

using namespace weightcast;

namespace {

constexpr uint64_t kBases = 256;
constexpr size_t kMostSeed = 4000;  // bytes of a body; the fuzzer's inputs are short

struct Known {
    Case c;
    std::vector<uint8_t> body;
};

// The base of a number, and a body of what follows it, every other one by our encoder; made once.
const Known& base_of(uint64_t seed) {
    static std::unique_ptr<Known> made[kBases];
    std::unique_ptr<Known>& known = made[seed];
    if (known) return *known;
    Random random(seed);
    known.reset(new Known{draw(random), {}});
    if (seed % 2)
        known->body = foreign_body(known->c, random);
    else
        encode_body(known->c.base.get(), known->c.fresh.get(), known->c.count, known->c.dtype, false, known->body);
    return *known;
}

// A valid input; empty where it is too long.
std::vector<uint8_t> seed_input(uint64_t seed) {
    const std::vector<uint8_t>& body = base_of(seed).body;
    if (body.size() > kMostSeed) return {};
    std::vector<uint8_t> input = {(uint8_t)seed, (uint8_t)(seed >> 8)};
    input.insert(input.end(), body.begin(), body.end());
    return input;
}

void write_seeds(const std::string& folder) {
    for (uint64_t seed = 0; seed < kBases; seed++) {
        const std::vector<uint8_t> input = seed_input(seed);
        if (input.empty()) continue;
        std::FILE* file = std::fopen((folder + "/seed-" + std::to_string(seed)).c_str(), "wb");
        if (!file || std::fwrite(input.data(), 1, input.size(), file) != input.size() || std::fclose(file))
            fail("a seed cannot be written", seed);
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

#ifndef WEIGHTCAST_LIBFUZZER
namespace {

constexpr size_t kDamagedBytes = 24;  // most of them of the head: counts, chunks, model

void run(const std::vector<uint8_t>& input) { LLVMFuzzerTestOneInput(input.data(), input.size()); }

// How many inputs were run.
size_t run_seeds() {
    size_t inputs = 0;
    for (uint64_t seed = 0; seed < kBases; seed++) {
        std::vector<uint8_t> input = seed_input(seed), out;
        if (input.empty()) continue;
        uint8_t digest[16];
        if (!decode(base_of(seed).c, base_of(seed).body, false, out, digest)) fail("a seed was refused", seed);
        run(input);
        const size_t damaged = std::min(input.size(), kDamagedBytes);
        for (size_t at = 0; at < damaged; at++) {
            std::vector<uint8_t> bad = input;
            bad[at] = (uint8_t)(bad[at] ^ 1u << seed % 8);
            run(bad);
        }
        inputs += 1 + damaged;
    }
    return inputs;
}

std::vector<uint8_t> read_file(const char* path) {
    std::FILE* file = std::fopen(path, "rb");
    if (!file) std::perror(path), std::exit(2);
    std::vector<uint8_t> input(1 << 20);
    input.resize(std::fread(input.data(), 1, input.size(), file));
    std::fclose(file);
    return input;
}

}  // namespace

int main(int argc, char** argv) {
    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++) run(read_file(argv[i]));
    std::printf("%zu inputs\n", argc > 1 ? (size_t)argc - 1 : run_seeds());
    return 0;
}
#endif
