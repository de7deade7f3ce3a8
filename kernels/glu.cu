// y = silu(gate) up, where each row of x is [gate | up]; dx has the same layout.
// TYPE: type of all tensors; WIDTH: columns that a thread processes at once, a divisor of all columns.
#include "memory.cuh"

constexpr int V = WIDTH;

struct Arguments {
  const TYPE* x;     // [rows, 2 columns]
  const TYPE* grad;  // [rows, columns]
  TYPE* y;           // [rows, columns]; dx [rows, 2 columns] in backward
  long long rows;
  int columns;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

__device__ inline float sigmoid(float value) { return quotient<TYPE>(1.0f, 1.0f + exponential<TYPE>(-value)); }

extern "C" __global__ void __launch_bounds__(THREADS) forward(const __grid_constant__ Arguments a) {
  const long long vectors = a.columns / V, all = a.rows * vectors, stride = (long long)gridDim.x * THREADS;
  for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < all; i += stride) {
    const long long row = i / vectors, column = i % vectors * V;
    const TYPE* x = a.x + 2 * row * a.columns + column;
    float gate[V], up[V];
    load(gate, x);
    load(up, x + a.columns);
#pragma unroll
    for (int k = 0; k < V; ++k) up[k] *= gate[k] * sigmoid(gate[k]);
    store(a.y + row * a.columns + column, up);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(const __grid_constant__ Arguments a) {
  const long long vectors = a.columns / V, all = a.rows * vectors, stride = (long long)gridDim.x * THREADS;
  for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < all; i += stride) {
    const long long row = i / vectors, column = i % vectors * V, place = 2 * row * a.columns + column;
    float gate[V], up[V], grad[V];
    load(gate, a.x + place);
    load(up, a.x + place + a.columns);
    load(grad, a.grad + row * a.columns + column);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float s = sigmoid(gate[k]), silu = gate[k] * s;
      gate[k] = grad[k] * up[k] * (s + silu * (1.0f - s));
      up[k] = grad[k] * silu;
    }
    store(a.y + place, gate);
    store(a.y + place + a.columns, up);
  }
}
