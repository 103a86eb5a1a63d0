// What the C++ kernels share: vectors of fp32 channels, elementary functions on them, rows of any dtype.
//
// Nothing here needs libtorch at run time: at::vec is header-only, and the functions below replace its calls to Sleef.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define CPU_CAPABILITY_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define CPU_CAPABILITY_AVX2
#endif

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <type_traits>

namespace ssm {
namespace {  // internal linkage: every file is compiled for this machine's instructions

using Vec = at::vec::Vectorized<float>;
using at::vec::fmadd;
constexpr int64_t W = Vec::size();

inline float sum_lanes(Vec x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_reduce_add_ps(x);
#else
  float lanes[W];
  x.store(lanes);
  for (int64_t half = W / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}

// Vector i of a row of them.
inline Vec get(const float* rows, int64_t i) { return Vec::loadu(rows + i * W); }
inline void put(float* rows, int64_t i, Vec x) { x.store(rows + i * W); }

// exp, relative error 1e-7 + 1.4e-8 |x|: 2^n 2^f with n + f = x log2(e), 2^f by a polynomial.
inline Vec exp(Vec x) {
  const Vec log2e(1.44269504f);
#if defined(CPU_CAPABILITY_AVX512)
  const Vec n = _mm512_roundscale_ps(x * log2e, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = at::vec::clamp(x, Vec(-87.f), Vec(88.f));  // so that 2^n is a normal number; passes NaN on
  const Vec n = (x * log2e).round();
#endif
  const Vec f = at::vec::fmsub(x, log2e, n);
  Vec p(1.5353362e-4f);  // minimax on [-1/2, 1/2], exact at 0
  p = fmadd(p, f, Vec(1.3398875e-3f));
  p = fmadd(p, f, Vec(9.6184369e-3f));
  p = fmadd(p, f, Vec(5.5503324e-2f));
  p = fmadd(p, f, Vec(2.4022648e-1f));
  p = fmadd(p, f, Vec(6.9314718e-1f));
  p = fmadd(p, f, Vec(1.f));
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_scalef_ps(p, n);
#else
  const auto exponent = at::vec::convert<int32_t>(n) + at::vec::Vectorized<int32_t>(127);
  return p * at::vec::cast<float>(exponent << at::vec::Vectorized<int32_t>(23));
#endif
}

inline Vec sigmoid(Vec x) { return Vec(1.f) / (Vec(1.f) + exp(x.neg())); }

// log(1 + w) for w in [0, 1], relative error 1e-7: 2 atanh(w / (2 + w)).
inline Vec log1p_unit(Vec w) {
  const Vec s = w / (w + Vec(2.f)), q = s * s;
  Vec p(2.8011993e-1f);
  p = fmadd(p, q, Vec(2.8001803e-1f));
  p = fmadd(p, q, Vec(4.0021527e-1f));
  p = fmadd(p, q, Vec(6.6666418e-1f));
  return fmadd(p * q, s, s + s);
}

// log(1 + exp(x)), and its derivative where asked for.
inline Vec softplus(Vec x, Vec* slope = nullptr) {
  const Vec one(1.f), w = exp(x.abs().neg());
  if (slope) *slope = Vec::blendv(w, one, x >= Vec(0.f)) / (one + w);
  return at::vec::maximum(x, Vec(0.f)) + log1p_unit(w);
}

enum DType : int64_t { kFloat = 0, kBFloat16 = 1, kHalf = 2 };

// A (b, l, channels) tensor whose channels lie side by side. Strides in elements.
struct Rows {
  char* data;  // null: not there
  int64_t batch, row, dtype;

  template <typename T>
  T* at(int64_t b, int64_t t, int64_t c) const {
    return reinterpret_cast<T*>(data) + b * batch + t * row + c;
  }

  // `count` channels from c on; zeros in the lanes beyond.
  Vec load(int64_t b, int64_t t, int64_t c, int64_t count) const {
    if (dtype == kFloat) return count == W ? Vec::loadu(at<float>(b, t, c)) : Vec::loadu(at<float>(b, t, c), count);
    return dtype == kBFloat16 ? load16<c10::BFloat16>(at<c10::BFloat16>(b, t, c), count)
                              : load16<c10::Half>(at<c10::Half>(b, t, c), count);
  }

  void store(int64_t b, int64_t t, int64_t c, int64_t count, Vec x) const {
    if (dtype == kFloat) {
      x.store(at<float>(b, t, c), count);
    } else if (dtype == kBFloat16) {
      at::vec::convert_float_bfloat16(x, x).store(at<c10::BFloat16>(b, t, c), count);
    } else {
      at::vec::convert_float_half(x, x).store(at<c10::Half>(b, t, c), count);
    }
  }

 private:
  template <typename T>
  static Vec load16(const T* p, int64_t count) {
    T whole[W];
    if (count < W) {
      std::fill_n(whole, W, T(0.f));
      std::copy_n(p, count, whole);
      p = whole;
    }
    Vec x;
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      at::vec::load_fp32_from_bf16(p, x);
    } else {
      at::vec::load_fp32_from_fp16(p, x);
    }
    return x;
  }
};

// fp32 scratch, aligned to a cache line.
class Buffer {
 public:
  explicit Buffer(int64_t floats) : p_(new (std::align_val_t(64)) float[floats]) {}
  ~Buffer() { ::operator delete[](p_, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator float*() const { return p_; }

 private:
  float* p_;
};

// Part `i` of `parts` near-equal parts of `blocks` blocks of W channels.
struct Part {
  int64_t begin, end;
  Part(int64_t i, int64_t parts, int64_t blocks) : begin(blocks * i / parts), end(blocks * (i + 1) / parts) {}
};

}  // namespace
}  // namespace ssm
