// Runs a CUDA source on a CPU, one block after the other, to find errors without a GPU.
//
// Every thread of a block is a fiber. A fiber runs until a barrier or a shuffle, and continues when all participants
// have arrived. Barriers that not all threads reach, misaligned accesses and shuffles of part of a warp are errors:
// fault() stores the first error, and the launch returns it. With `reversed`, threads run in decreasing order, which
// reveals races between barriers.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define ON_CPU 1
#define __global__
#define __device__
#define __forceinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks come one after the other

struct Index { int x = 0, y = 0, z = 0; };
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

constexpr size_t STACK = 64 * 1024;
constexpr int MAX_THREADS = 1024;

struct Fiber {
  jmp_buf context;
  ucontext_t entry;
  bool started, done;
};

static Fiber fibers[MAX_THREADS];
static char* stacks;
static jmp_buf home;
static ucontext_t scheduler;
static int current, threads, alive;
static long progress;        // arrivals at barriers and ends of threads
static const char* waiting;  // error if the fiber that waits last never continues
static int arrived, generation;                    // of the block's barrier
static int warp_arrived[32], warp_generation[32];  // of the barriers of warps
static unsigned slots[2][MAX_THREADS];             // values of the lanes, for two consecutive shuffles
static int shuffles[MAX_THREADS];
static char error[256];
static void (*body)();

static void fault(const char* message) {
  if (!error[0]) snprintf(error, sizeof error, "%s (block %d, thread %d)", message, blockIdx.x, current);
}

static void yield() {
  if (!_setjmp(fibers[current].context)) _longjmp(home, 1);
}

static void enter() {
  body();
  fibers[current].done = true;
  --alive;
  ++progress;
  _longjmp(home, 1);
}

static void resume(int t) {
  current = t;
  threadIdx.x = t;
  if (_setjmp(home)) return;
  Fiber& fiber = fibers[t];
  if (fiber.started) _longjmp(fiber.context, 1);
  fiber.started = true;
  getcontext(&fiber.entry);
  fiber.entry.uc_stack.ss_sp = stacks + t * STACK;
  fiber.entry.uc_stack.ss_size = STACK;
  fiber.entry.uc_link = nullptr;
  makecontext(&fiber.entry, enter, 0);
  setcontext(&fiber.entry);
}

static void wait(int& count, int& round, int all, const char* message) {
  int arrival_round = round;
  ++progress;
  if (++count == all) {
    count = 0;
    ++round;
    return;
  }
  while (round == arrival_round) {
    waiting = message;
    yield();
  }
}

// Runs blocks 0 .. blocks - 1 of `count` threads; returns the first error, or an empty string.
static const char* run(int blocks, int count, bool reversed, void (*kernel)()) {
  if (!stacks) stacks = (char*)malloc(MAX_THREADS * STACK);
  error[0] = 0;
  body = kernel;
  threads = count;
  blockDim.x = count, gridDim.x = blocks;
  for (int b = 0; b < blocks && !error[0]; ++b) {
    blockIdx.x = reversed ? blocks - 1 - b : b;
    alive = count;
    arrived = 0;
    memset(warp_arrived, 0, sizeof warp_arrived);
    memset(shuffles, 0, sizeof shuffles);
    for (int t = 0; t < count; ++t) fibers[t].started = fibers[t].done = false;
    while (alive && !error[0]) {
      long before = progress;
      for (int k = 0; k < count && !error[0]; ++k) {
        int t = reversed ? count - 1 - k : k;
        if (!fibers[t].done) resume(t);
      }
      if (progress == before) fault(waiting);
    }
  }
  return error;
}

}  // namespace on_cpu

#define CHECK_ALIGNED(pointer, bytes) \
  if ((uintptr_t)(pointer) % (bytes)) on_cpu::fault("access to memory that is not aligned")

static inline void __syncthreads() {
  on_cpu::wait(on_cpu::arrived, on_cpu::generation, on_cpu::threads, "a barrier that not all threads reach");
}

static inline void __syncwarp(unsigned = 0xffffffffu) {
  int warp = threadIdx.x / 32;
  on_cpu::wait(on_cpu::warp_arrived[warp], on_cpu::warp_generation[warp], 32, "not all lanes reach a shuffle");
}

template <class T>
static inline T __shfl_xor_sync(unsigned, T value, int lanes) {
  static_assert(sizeof(T) == 4, "32 bits at once");
  int me = threadIdx.x, side = on_cpu::shuffles[me]++ % 2;
  memcpy(&on_cpu::slots[side][me], &value, 4);
  __syncwarp();
  memcpy(&value, &on_cpu::slots[side][me ^ lanes], 4);
  return value;
}

static inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}

#define rsqrtf host_rsqrtf  // glibc 2.42 has an rsqrtf, which is not static
static inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }

#define __expf(value) expf(value)  // glibc declares functions of these names
#define __sinf(value) sinf(value)
#define __cosf(value) cosf(value)

static inline float __fdividef(float a, float b) { return a / b; }

static inline float half_to_float(unsigned short bits) {
  unsigned exponent = bits >> 10 & 31, fraction = bits & 1023;
  float size = exponent == 0    ? ldexpf((float)fraction, -24)
               : exponent == 31 ? (fraction ? NAN : INFINITY)
                                : ldexpf((float)(fraction + 1024), (int)exponent - 25);
  return bits >> 15 ? -size : size;
}

static inline unsigned short float_to_half(float value) {
  unsigned short sign = std::signbit(value) ? 0x8000 : 0;
  float size = fabsf(value);
  if (std::isnan(value)) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < 6.103515625e-5f) return sign | (unsigned short)rintf(ldexpf(size, 24));  // subnormal
  int exponent;
  float fraction = rintf(ldexpf(frexpf(size, &exponent), 11));  // 1024 .. 2048; 2048 carries to the exponent
  return sign | (unsigned short)(((exponent + 13) << 10) + (int)fraction);
}
