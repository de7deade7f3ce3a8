// Bias and tanh GELU: y = u sigmoid(2 k (u + 0.044715 u^3)) with u = x + bias and k = sqrt(2 / pi).
// TYPE: type of x; BIAS: type of bias; WIDTH: columns per thread, a divisor of all columns.
#include "columns.cuh"
#include "memory.cuh"

constexpr int V = WIDTH;
constexpr float TWO_K = 1.5957691216057308f, CUBIC = 0.044715f;

struct Arguments {
  const TYPE* x;
  const BIAS* bias;
  const TYPE* grad;
  TYPE* y;          // dx in backward
  float* partials;  // [at_once, columns]: each thread's sums of dx
  long long rows;
  int columns;
  int at_once;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

__device__ inline float gate(float u) {
  return quotient<TYPE>(1.0f, 1.0f + exponential<TYPE>(-TWO_K * (u + CUBIC * u * u * u)));
}

extern "C" __global__ void __launch_bounds__(THREADS) forward(const __grid_constant__ Arguments a) {
  const Place at = place(a.columns, V, a.at_once);
  if (at.idle) return;
  float bias[V];
  load(bias, a.bias + at.column);
#pragma unroll 2
  for (long long row = at.row; row < a.rows; row += a.at_once) {
    float u[V];
    load(u, a.x + row * a.columns + at.column);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      u[k] += bias[k];
      u[k] *= gate(u[k]);
    }
    store(a.y + row * a.columns + at.column, u);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(const __grid_constant__ Arguments a) {
  const Place at = place(a.columns, V, a.at_once);
  if (at.idle) return;
  float bias[V], sums[V] = {};
  load(bias, a.bias + at.column);
#pragma unroll 2
  for (long long row = at.row; row < a.rows; row += a.at_once) {
    float u[V], grad[V];
    load(u, a.x + row * a.columns + at.column);
    load(grad, a.grad + row * a.columns + at.column);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      u[k] += bias[k];
      const float g = gate(u[k]);
      const float inner = TWO_K * (u[k] + 3.0f * CUBIC * u[k] * u[k] * u[k]);
      grad[k] *= g + g * (1.0f - g) * inner;
      sums[k] += grad[k];
    }
    store(a.y + row * a.columns + at.column, grad);
  }
  store(a.partials + at.row * a.columns + at.column, sums);
}
