// Access to memory by 16 bytes a thread, whatever the type.
#pragma once
#include "number.cuh"

#ifndef CHECK_ALIGNED  // on a CPU the tests define it; a GPU traps by itself
#define CHECK_ALIGNED(pointer, bytes)
#endif

struct alignas(8) Bytes8 { unsigned words[2]; };
struct alignas(16) Bytes16 { unsigned words[4]; };

template <int BYTES> struct Unit;
template <> struct Unit<2> { using type = unsigned short; };
template <> struct Unit<4> { using type = unsigned; };
template <> struct Unit<8> { using type = Bytes8; };
template <> struct Unit<16> { using type = Bytes16; };

// V consecutive elements, in as few accesses as their alignment allows.
template <class T, int V>
union Vector {
  static constexpr int BYTES = V * (int)sizeof(T) < 16 ? V * (int)sizeof(T) : 16;
  static constexpr int UNITS = V * (int)sizeof(T) / BYTES;
  typename Unit<BYTES>::type units[UNITS];
  T at[V];
};

template <int V, class T>
__device__ inline void load(float (&values)[V], const T* from) {
  using Whole = Vector<T, V>;
  CHECK_ALIGNED(from, Whole::BYTES);
  Whole whole;
#pragma unroll
  for (int i = 0; i < Whole::UNITS; ++i)
    whole.units[i] = reinterpret_cast<const typename Unit<Whole::BYTES>::type*>(from)[i];
#pragma unroll
  for (int i = 0; i < V; ++i) values[i] = widen(whole.at[i]);
}

template <int V, class T>
__device__ inline void store(T* into, const float (&values)[V]) {
  using Whole = Vector<T, V>;
  CHECK_ALIGNED(into, Whole::BYTES);
  Whole whole;
#pragma unroll
  for (int i = 0; i < V; ++i) narrow(values[i], whole.at[i]);
#pragma unroll
  for (int i = 0; i < Whole::UNITS; ++i)
    reinterpret_cast<typename Unit<Whole::BYTES>::type*>(into)[i] = whole.units[i];
}

// Elements before the first from which on V of them are one aligned access; V where there is no such place.
template <int V, class T>
__device__ inline int unaligned(const T* pointer) {
  unsigned long long address = (unsigned long long)pointer;
  constexpr unsigned long long bytes = Vector<T, V>::BYTES;
  if (address % sizeof(T)) return V;
  return (int)((bytes - address % bytes) % bytes / sizeof(T));
}

// Applies whole(i) to V elements from i on and single(i) to the few before and after, the threads of a block
// sharing n elements. `head`: elements before the first aligned one; V or more: nothing is aligned.
template <int V, class Whole, class Single>
__device__ inline void share(long long n, int head, Whole whole, Single single) {
  if (head >= V) {
    for (long long i = threadIdx.x; i < n; i += THREADS) single(i);
    return;
  }
  long long first = head < n ? head : n;
  long long vectors = (n - first) / V;
  for (long long j = threadIdx.x; j < vectors; j += THREADS) whole(first + j * V);
  long long last = first + vectors * V;
  for (long long k = threadIdx.x; k < first + n - last; k += THREADS) single(k < first ? k : last + k - first);
}
