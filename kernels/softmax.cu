// Softmax of scaled scores over the past, a row a block: row i of a matrix has i + 1 scores that count, and only
// those are read. A thread holds ITEMS groups of WIDTH elements of the row in registers.
// TYPE: of scores; BACKWARD: 0 or 1; WIDTH, ITEMS: WIDTH * ITEMS * THREADS >= size, which WIDTH divides.
#include "block.cuh"
#include "memory.cuh"

constexpr int V = WIDTH;

struct Arguments {
  const TYPE* x;     // scores; in backward the weights
  const TYPE* grad;  // in backward
  TYPE* y;
  long long rows;
  int size;  // of a row
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
