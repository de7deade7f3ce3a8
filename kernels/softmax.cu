// Causal softmax of scaled scores. A block processes one row: row i of a matrix has i + 1 unmasked scores, and only
// these are read. A thread has ITEMS groups of WIDTH elements of the row in registers.
// TYPE: type of scores; BACKWARD: 0 or 1; WIDTH, ITEMS: WIDTH * ITEMS * THREADS >= size, and WIDTH divides size.
#include "block.cuh"
#include "memory.cuh"

constexpr int V = WIDTH;

struct Arguments {
  const TYPE* x;     // scores; in backward, the attention weights
  const TYPE* grad;  // gradient of the attention weights, in backward
  TYPE* y;           // attention weights; in backward, the gradient of the scores
  long long rows;
  int size;  // number of scores per row
  float scale;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

__device__ inline int column(int item) { return (item * THREADS + (int)threadIdx.x) * V; }

#if !BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS) forward(const __grid_constant__ Arguments a) {
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int last = (int)(row % a.size);
    const long long start = row * a.size;
    float values[ITEMS][V];
    float most = -infinity();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (column(i) > last) continue;
      load(values[i], a.x + start + column(i));
#pragma unroll
      for (int k = 0; k < V; ++k) {
        values[i][k] = column(i) + k <= last ? values[i][k] * a.scale : -infinity();
        most = larger(most, values[i][k]);
      }
    }
    most = reduce<Larger>(most);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (column(i) > last) continue;
#pragma unroll
      for (int k = 0; k < V; ++k) {
        values[i][k] = column(i) + k <= last ? exponential<TYPE>(values[i][k] - most) : 0.0f;
        sum += values[i][k];
      }
    }
    const float inverse = 1.0f / reduce<Add>(sum);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (column(i) >= a.size) continue;
#pragma unroll
      for (int k = 0; k < V; ++k) values[i][k] = column(i) + k <= last ? values[i][k] * inverse : 0.0f;
      store(a.y + start + column(i), values[i]);
    }
  }
}
#else
// dx = scale y (grad - sum(grad y)).
extern "C" __global__ void __launch_bounds__(THREADS) backward(const __grid_constant__ Arguments a) {
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int last = (int)(row % a.size);
    const long long start = row * a.size;
    float weight[ITEMS][V], grad[ITEMS][V];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (column(i) > last) continue;
      load(weight[i], a.x + start + column(i));
      load(grad[i], a.grad + start + column(i));
#pragma unroll
      for (int k = 0; k < V; ++k)
        if (column(i) + k <= last) sum += weight[i][k] * grad[i][k];
    }
    sum = reduce<Add>(sum);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (column(i) >= a.size) continue;
#pragma unroll
      for (int k = 0; k < V; ++k)
        grad[i][k] = column(i) + k <= last ? a.scale * weight[i][k] * (grad[i][k] - sum) : 0.0f;
      store(a.y + start + column(i), grad[i]);
    }
  }
}
#endif
