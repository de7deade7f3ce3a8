// Column sums of matrices.  `partial_sums` reduces one matrix [rows, columns] to fp32 partial sums [count, columns].
// `column_sums` reduces fp32 matrices [count, rows, columns] over rows: a block has 32 columns, and warps share rows.
// TYPE: type of the matrix and of the sums; WIDTH: columns per thread of `partial_sums`, a divisor of all columns.
#include "columns.cuh"
#include "memory.cuh"

constexpr int WARPS = THREADS / 32, V = WIDTH;

struct Arguments {
  const float* matrices;
  TYPE* sums;  // [count, columns]
  const TYPE* matrix;
  float* partials;
  int rows;
  int columns;
  int count;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

extern "C" __global__ void __launch_bounds__(THREADS) column_sums(const __grid_constant__ Arguments a) {
  __shared__ float of_warp[WARPS][32];
  const int groups = (a.columns + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int job = blockIdx.x; job < groups * a.count; job += gridDim.x) {
    const int column = job % groups * 32 + lane;
    const float* matrix = a.matrices + (long long)(job / groups) * a.rows * a.columns;
    float sum = 0.0f;
    if (column < a.columns)
#pragma unroll 4
      for (int row = warp; row < a.rows; row += WARPS) sum += matrix[(long long)row * a.columns + column];
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < a.columns) {
      for (int w = 1; w < WARPS; ++w) sum += of_warp[w][lane];
      a.sums[(long long)(job / groups) * a.columns + column] = narrowed<TYPE>(sum);
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) partial_sums(const __grid_constant__ Arguments a) {
  const Place at = place(a.columns, V, a.count);
  if (at.idle) return;
  float sums[V] = {};
#pragma unroll 4
  for (long long row = at.row; row < a.rows; row += a.count) {
    float values[V];
    load(values, a.matrix + row * a.columns + at.column);
#pragma unroll
    for (int k = 0; k < V; ++k) sums[k] += values[k];
  }
  store(a.partials + at.row * a.columns + at.column, sums);
}
