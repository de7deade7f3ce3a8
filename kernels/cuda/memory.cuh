// Loads and stores of up to 16 bytes per access, for elements of any type.
#pragma once
#include "number.cuh"

#ifndef CHECK_ALIGNED  // Tests on a CPU define this check. A GPU detects unaligned accesses itself.
#define CHECK_ALIGNED(pointer, bytes)
#endif

struct alignas(8) Bytes8 { unsigned words[2]; };
struct alignas(16) Bytes16 { unsigned words[4]; };

template <int BYTES> struct Unit;
template <> struct Unit<2> { using type = unsigned short; };
template <> struct Unit<4> { using type = unsigned; };
template <> struct Unit<8> { using type = Bytes8; };
template <> struct Unit<16> { using type = Bytes16; };

// V consecutive elements of type T, as accesses of up to 16 bytes.
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

// Returns the number of elements before the first one that is aligned for accesses to V elements; V if none is.
template <int V, class T>
__device__ inline int unaligned(const T* pointer) {
  unsigned long long address = (unsigned long long)pointer;
  constexpr unsigned long long bytes = Vector<T, V>::BYTES;
  if (address % sizeof(T)) return V;
  return (int)((bytes - address % bytes) % bytes / sizeof(T));
}

// Shares n elements among the threads of a block: calls whole(i) for groups of V elements from an aligned index i on,
// and single(i) for the elements before and after these groups. `head`: result of `unaligned`.
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
