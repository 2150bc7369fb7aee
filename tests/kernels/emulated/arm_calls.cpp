// Runs the operators for another process, whose processor cannot: it says what to call over standard input.
//
// A request: the function's name (64 bytes), how many pieces of memory follow, each with its size and bytes, and for
// each of 5 arguments the piece that it points to, or -1; how many pointers within pieces there are, and of each the
// piece, the offset in it, and the piece that is pointed to. Numbers are int64. The answer: what the function returned,
// and all pieces as they are then.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

extern "C" {
int64_t baton_quantized_packed_size(const void*);
void baton_quantized_pack(const void*, const void*, const void*, const void*, void*);
void baton_quantized_linear(const void*);
void baton_quantized_experts(const void*);

// Teams are one thread here.
void GOMP_parallel(void (*function)(void*), void* data, unsigned, unsigned) { function(data); }
void GOMP_barrier() {}
int omp_get_thread_num() { return 0; }
int omp_get_num_threads() { return 1; }
}

namespace {

bool get(void* to, size_t size) { return fread(to, 1, size, stdin) == size; }
int64_t number() {
  int64_t value;
  if (!get(&value, 8)) exit(1);
  return value;
}

}  // namespace

int main() {
  char name[64];
  while (get(name, sizeof name)) {
    std::vector<std::pair<char*, int64_t>> pieces(number());
    for (auto& [data, size] : pieces) {
      size = number();
      data = (char*)aligned_alloc(64, (size + 64) / 64 * 64);
      if (!get(data, size)) return 1;
    }
    void* given[5];
    for (void*& each : given) {
      const int64_t index = number();
      each = index < 0 ? nullptr : pieces[index].first;
    }
    for (int64_t count = number(); count > 0; --count) {
      const int64_t piece = number(), offset = number(), to = number();
      std::memcpy(pieces[piece].first + offset, &pieces[to].first, 8);
    }
    int64_t result = 0;
    const std::string wanted = name;
    if (wanted == "packed_size") {
      result = baton_quantized_packed_size(given[0]);
    } else if (wanted == "pack") {
      baton_quantized_pack(given[0], given[1], given[2], given[3], given[4]);
    } else if (wanted == "linear") {
      baton_quantized_linear(given[0]);
    } else if (wanted == "experts") {
      baton_quantized_experts(given[0]);
    } else {
      return 2;
    }
    fwrite(&result, 8, 1, stdout);
    for (auto& [data, size] : pieces) {
      fwrite(data, 1, size, stdout);
      free(data);
    }
    fflush(stdout);
  }
}
