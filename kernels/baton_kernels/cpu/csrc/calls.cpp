// Calls of operators one after the other, without the interpreter between them.
#include <cstdint>

// Laid out as the ctypes structure NativeCall.
struct Call {
  void (*function)();  // takes the structure; returns nothing, or, if `checked`, an int: 0 unless it failed
  const void* structure;
  int64_t checked;
};

// Returns how many were made: all, or those before one that failed.
extern "C" int64_t baton_run_calls(const Call* calls, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const Call& call = calls[i];
    if (!call.checked) ((void (*)(const void*))call.function)(call.structure);
    else if (((int (*)(const void*))call.function)(call.structure)) return i;
  }
  return count;
}
