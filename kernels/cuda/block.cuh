// Sums and maxima over the threads of a block. Every thread must call `reduce`, and every thread receives the result.
#pragma once
#include "number.cuh"

struct Add {
  static __device__ float of(float a, float b) { return a + b; }
  static __device__ float none() { return 0.0f; }
};
struct Larger {
  static __device__ float of(float a, float b) { return larger(a, b); }
  static __device__ float none() { return -infinity(); }
};

// Performs N reductions with one pair of barriers. The order of additions is fixed, so results are reproducible.
template <class Op, int N>
__device__ inline void reduce(float (&values)[N]) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2)
#pragma unroll
    for (int n = 0; n < N; ++n) values[n] = Op::of(values[n], __shfl_xor_sync(0xffffffffu, values[n], lane));
  constexpr int WARPS = THREADS / 32;
  if (WARPS == 1) return;
  __shared__ float of_warp[N][32];
  __syncthreads();  // Other threads may still read the results of a preceding reduction.
  if (threadIdx.x % 32 == 0)
#pragma unroll
    for (int n = 0; n < N; ++n) of_warp[n][threadIdx.x / 32] = values[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    values[n] = threadIdx.x % 32 < WARPS ? of_warp[n][threadIdx.x % 32] : Op::none();
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
      values[n] = Op::of(values[n], __shfl_xor_sync(0xffffffffu, values[n], lane));
  }
}

template <class Op>
__device__ inline float reduce(float value) {
  float values[1] = {value};
  reduce<Op>(values);
  return values[0];
}
