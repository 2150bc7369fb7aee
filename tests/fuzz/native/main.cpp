// Runs a target without libFuzzer: files are replayed; without any, seeded random inputs for some seconds of processor time.
// usage: TARGET [--seed N] [--seconds N] [FILE...]
#include <ctime>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "choices.h"

int main(int count, char **arguments) {
    uint64_t seed = 1, runs = 0, files = 0;
    double seconds = 1;
    for (int i = 1; i < count; i++) {
        const std::string word = arguments[i];
        if (word == "--seed" && i + 1 < count) seed = std::stoull(arguments[++i]);
        else if (word == "--seconds" && i + 1 < count) seconds = std::stod(arguments[++i]);
        else {
            std::ifstream in(word, std::ios::binary);
            const std::vector<char> data((std::istreambuf_iterator<char>(in)), {});
            LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t *>(data.data()), data.size());
            files++;
        }
    }
    std::mt19937_64 random(seed);
    const std::clock_t end = std::clock() + static_cast<std::clock_t>(seconds * CLOCKS_PER_SEC);
    std::vector<uint8_t> data;
    while (std::clock() < end) {
        data.resize(random() % (random() % 8 ? 256 : 4096));
        for (auto &each : data) each = static_cast<uint8_t>(random() >> (random() % 4 ? 0 : 60));
        LLVMFuzzerTestOneInput(data.data(), data.size());
        runs++;
    }
    std::printf("replayed %llu files, ran %llu inputs\n", (unsigned long long)files, (unsigned long long)runs);
}
