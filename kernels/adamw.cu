// AdamW over many flat shards in one launch: unscale, decay, moments, fp32 master and 16-bit copy in one pass.
// GRADIENT, COPY: types of gradients and copies; HAS_COPY: 0 or 1; SHARDS: maximum number of shards per launch;
// CHUNK: number of elements that a thread block processes at once.
#include "memory.cuh"

constexpr int V = 4;

struct Shard {
  float* master;
  const GRADIENT* gradient;
  float* first;
  float* second;
  COPY* copy;
  long long count;
};

struct Arguments {
  Shard shards[SHARDS];
  int chunks[SHARDS];  // number of chunks in this shard and all preceding shards
  const float* step;
  const float* rate;
  const float* scale;      // divisor of gradients; null stands for 1
  const float* found_inf;  // 1 skips the update; null stands for 0
  float beta1, beta2, log_beta1, log_beta2, epsilon, decay;
  int shard_count;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

struct Step {
  float inverse_scale, rate, beta1, beta2, epsilon, keep, first_rate, inverse_root;
  bool skip;

  __device__ explicit Step(const Arguments& a) {
    float step = *a.step;
    inverse_scale = a.scale ? 1.0f / *a.scale : 1.0f;
    rate = *a.rate;
    beta1 = a.beta1, beta2 = a.beta2, epsilon = a.epsilon;
    keep = 1.0f - rate * a.decay;
    // expm1f gives 1 - beta^step exactly; a plain difference would lose four digits in the first steps.
    first_rate = rate / -expm1f(step * a.log_beta1);
    inverse_root = rsqrtf(-expm1f(step * a.log_beta2));
    skip = a.found_inf && *a.found_inf != 0.0f;
  }

  __device__ void operator()(float& master, float gradient, float& first, float& second) const {
    gradient *= inverse_scale;
    first += (1.0f - beta1) * (gradient - first);
    second = beta2 * second + (1.0f - beta2) * gradient * gradient;
    master = master * keep - first_rate * first / (sqrtf(second) * inverse_root + epsilon);
  }
};

template <int N>
__device__ inline void update(const Shard& shard, const Step& step, long long i) {
  float master[N], gradient[N], first[N], second[N];
  load(master, shard.master + i);
  if (!step.skip) {
    load(gradient, shard.gradient + i);
    load(first, shard.first + i);
    load(second, shard.second + i);
#pragma unroll
    for (int k = 0; k < N; ++k) step(master[k], gradient[k], first[k], second[k]);
    store(shard.master + i, master);
    store(shard.first + i, first);
    store(shard.second + i, second);
  }
  if (HAS_COPY) store(shard.copy + i, master);
}

// The minimum of one block per multiprocessor keeps the assembler from spilling registers to fit another block.
extern "C" __global__ void __launch_bounds__(THREADS, 1) adamw(const __grid_constant__ Arguments a) {
  const Step step(a);
  int s = 0;
  for (int chunk = blockIdx.x; chunk < a.chunks[a.shard_count - 1]; chunk += gridDim.x) {
    while (chunk >= a.chunks[s]) ++s;
    const Shard& whole = a.shards[s];
    long long begin = (long long)(chunk - (s ? a.chunks[s - 1] : 0)) * CHUNK;
    const Shard part = {whole.master + begin, whole.gradient + begin, whole.first + begin,
                        whole.second + begin, whole.copy + (HAS_COPY ? begin : 0), whole.count - begin};
    int head = unaligned<V>(part.master);
    bool agree = head == unaligned<V>(part.gradient) && head == unaligned<V>(part.first) &&
                 head == unaligned<V>(part.second) && (!HAS_COPY || head == unaligned<V>(part.copy));
    share<V>(
        part.count < CHUNK ? part.count : CHUNK, agree ? head : V,
        [&](long long i) { update<V>(part, step, i); }, [&](long long i) { update<1>(part, step, i); });
  }
}
