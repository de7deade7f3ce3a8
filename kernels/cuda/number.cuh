// 16-bit floating-point numbers as bits, so that no header of the CUDA toolkit is needed. All arithmetic is in fp32.
#pragma once

struct half { unsigned short bits; };
struct bfloat16 { unsigned short bits; };

__device__ inline float widen(float value) { return value; }

__device__ inline float widen(bfloat16 value) { return __uint_as_float((unsigned)value.bits << 16); }

__device__ inline float widen(half value) {
#ifdef ON_CPU
  return half_to_float(value.bits);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#endif
}

// Rounds to the nearest number of the other type; of two equally near ones, to the even one.
__device__ inline void narrow(float value, float& into) { into = value; }

__device__ inline void narrow(float value, half& into) {
#ifdef ON_CPU
  into.bits = float_to_half(value);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(into.bits) : "f"(value));
#endif
}

__device__ inline void narrow(float value, bfloat16& into) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(into.bits) : "f"(value));
#else  // Volta and Turing have no instruction for this conversion.
  unsigned bits = __float_as_uint(value);
  bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  into.bits = nan ? 0x7fff : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
#endif
}

template <class T>
__device__ inline T narrowed(float value) {
  T result;
  narrow(value, result);
  return result;
}

// Returns the maximum, or NaN if a or b is NaN, like torch's maximum; fmaxf would ignore NaN.
__device__ inline float larger(float a, float b) { return a != a || a > b ? a : b; }

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

// exp and quotient with fp32 accuracy for fp32 results, and faster with about 20 bits of accuracy for 16-bit results,
// because a kernel that moves half the bytes has time for half the instructions.
template <class T>
__device__ inline float exponential(float value) {
  return sizeof(T) == 2 ? __expf(value) : expf(value);
}

template <class T>
__device__ inline float quotient(float a, float b) {
  return sizeof(T) == 2 ? __fdividef(a, b) : a / b;
}
