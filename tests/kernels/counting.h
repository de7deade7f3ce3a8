// Writes down every access to memory of a kernel on the CPU: the compiler is told to announce each, as it does for
// an address sanitizer, and this answers. Stacks of threads are left out; everything else is kept, in order.
#pragma once
#include <cstdlib>

#define UNWATCHED __attribute__((no_sanitize("kernel-address")))

namespace counting {
struct Access { unsigned long long address; unsigned size, write; };
static Access* log;
static size_t used, room;

UNWATCHED static void note(unsigned long address, size_t size, unsigned write) {
  const char* at = (const char*)address;
  if (at >= on_cpu::stacks && at < on_cpu::stacks + on_cpu::MOST * on_cpu::STACK) return;
  if (used == room) log = (Access*)realloc(log, sizeof(Access) * (room = room ? 2 * room : 4096));
  log[used++] = {address, (unsigned)size, write};
}
}  // namespace counting

extern "C" {
#define ANNOUNCED(size)                                                                                    \
  UNWATCHED void __asan_load##size##_noabort(unsigned long at) { counting::note(at, size, 0); }            \
  UNWATCHED void __asan_store##size##_noabort(unsigned long at) { counting::note(at, size, 1); }
ANNOUNCED(1) ANNOUNCED(2) ANNOUNCED(4) ANNOUNCED(8) ANNOUNCED(16)
UNWATCHED void __asan_loadN_noabort(unsigned long at, size_t size) { counting::note(at, size, 0); }
UNWATCHED void __asan_storeN_noabort(unsigned long at, size_t size) { counting::note(at, size, 1); }
UNWATCHED void __asan_handle_no_return() {}
UNWATCHED const counting::Access* counted(size_t* count) {
  *count = counting::used;
  counting::used = 0;
  return counting::log;
}
}
