// Rotary positions. A thread computes sine and cosine for V pairs of one token, and rotates the pairs in all heads.
// Elements of a head after the rotated pairs, and heads from `heads` on, are copied.
// TYPE: type of all tensors; WIDTH: elements that a thread processes at once, a divisor of `pairs` and of the rest.
#include "memory.cuh"

constexpr int V = WIDTH;
constexpr float INVERSE_TURN = 0.15915494309189535f, TURN = 6.28125f, TURN_REST = 1.9353071795864769e-3f;

struct Arguments {
  const TYPE* x;
  TYPE* y;
  long long tokens;  // number of tokens of all samples
  int sequence;      // number of tokens per sample
  int first_position, split, jump; // row j has position first_position + j, plus jump for j >= split
  int all_heads;
  int heads;
  int head_width;
  int pairs;     // number of rotated pairs per head
  float octaves; // log2(base) / pairs
  float sign;    // -1 rotates by the negative angle (backward)
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

// The minimum of one block per multiprocessor keeps the assembler from spilling registers to fit another block.
extern "C" __global__ void __launch_bounds__(THREADS, 1) rotary(const __grid_constant__ Arguments a) {
  const int of_pairs = a.pairs / V, of_rest = (a.head_width - 2 * a.pairs) / V, vectors = of_pairs + of_rest;
  const long long all = a.tokens * vectors, stride = (long long)gridDim.x * THREADS;
  for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < all; i += stride) {
    const long long token = i / vectors, start = token * a.all_heads * a.head_width;
    const int vector = (int)(i % vectors);
    if (vector >= of_pairs) {
      const long long at = start + 2 * a.pairs + (vector - of_pairs) * V;
      for (int head = 0; head < a.all_heads; ++head) {
        float rest[V];
        load(rest, a.x + at + head * a.head_width);
        store(a.y + at + head * a.head_width, rest);
      }
      continue;
    }
    const int row = (int)(token % a.sequence);
    const float position = (float)(a.first_position + row + (row >= a.split ? a.jump : 0));
    float cosine[V], sine[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float angle = position * exp2f(-a.octaves * (float)(vector * V + k));
      // Subtract full turns in two steps. TURN has few bits, so its product is exact and the remainder exact to fp32.
      const float turns = rintf(angle * INVERSE_TURN);
      const float left = fmaf(-turns, TURN_REST, fmaf(-turns, TURN, angle));
      cosine[k] = __cosf(left);
      sine[k] = a.sign * __sinf(left);
    }
    const long long at = start + vector * V;
    for (int head = 0; head < a.all_heads; ++head) {
      const long long place = at + head * a.head_width;
      float first[V], second[V];
      load(first, a.x + place);
      load(second, a.x + place + a.pairs);
      if (head < a.heads) {
#pragma unroll
        for (int k = 0; k < V; ++k) {
          const float turned = first[k] * cosine[k] - second[k] * sine[k];
          second[k] = second[k] * cosine[k] + first[k] * sine[k];
          first[k] = turned;
        }
      }
      store(a.y + place, first);
      store(a.y + place + a.pairs, second);
    }
  }
}
