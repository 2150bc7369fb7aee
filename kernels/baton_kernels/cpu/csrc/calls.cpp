// Calls of operators one after the other, without the interpreter between them.
#include "operators.h"

using namespace baton;

extern "C" int64_t baton_run_calls(const Call* calls, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const Call& call = calls[i];
    if (!call.checked) ((void (*)(const void*))call.function)(call.structure);
    else if (((int (*)(const void*))call.function)(call.structure)) return i;
  }
  return count;
}
