// Logs every memory access of a kernel on the CPU, in order. The compiler inserts the calls of an address sanitizer,
// and the functions below log the accesses. Accesses to the stacks of threads are omitted.
#pragma once
#include <cstdlib>

#define NOT_SANITIZED __attribute__((no_sanitize("kernel-address")))

namespace counting {
struct Access { unsigned long long address; unsigned size, write; };
static Access* log;
static size_t used, limit;

NOT_SANITIZED static void record(unsigned long address, size_t size, unsigned write) {
  const char* pointer = (const char*)address;
  if (pointer >= on_cpu::stacks && pointer < on_cpu::stacks + on_cpu::MAX_THREADS * on_cpu::STACK) return;
  if (used == limit) log = (Access*)realloc(log, sizeof(Access) * (limit = limit ? 2 * limit : 4096));
  log[used++] = {address, (unsigned)size, write};
}
}  // namespace counting

extern "C" {
#define SANITIZER_CALLS(size)                                                                          \
  NOT_SANITIZED void __asan_load##size##_noabort(unsigned long at) { counting::record(at, size, 0); }  \
  NOT_SANITIZED void __asan_store##size##_noabort(unsigned long at) { counting::record(at, size, 1); }
SANITIZER_CALLS(1) SANITIZER_CALLS(2) SANITIZER_CALLS(4) SANITIZER_CALLS(8) SANITIZER_CALLS(16)
NOT_SANITIZED void __asan_loadN_noabort(unsigned long at, size_t size) { counting::record(at, size, 0); }
NOT_SANITIZED void __asan_storeN_noabort(unsigned long at, size_t size) { counting::record(at, size, 1); }
NOT_SANITIZED void __asan_handle_no_return() {}
NOT_SANITIZED const counting::Access* counted(size_t* count) {
  *count = counting::used;
  counting::used = 0;
  return counting::log;
}
}
