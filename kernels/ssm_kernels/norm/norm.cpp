// Residual add, row gather and RMS or layer norm: memory is read once and written once, forward and backward.
//
// A row is handled as fp32 in the first-level cache: in place where it is fp32 in memory, else converted to scratch.
// The loops over it are then short passes that cost little beside the memory traffic. Results are walked in order;
// only reading x and residual, and writing their gradients, goes through the index.
#include "../vector.h"

#include <cmath>

namespace ssm {
namespace {

constexpr int64_t kRows = 64;  // rows whose parameter gradients are one running sum

// Mirrored by `_Call` in cpu.py.
struct Norm {
  int64_t b, l, d, threads, centred;
  double eps;
  const int64_t* index;        // null: in order
  const float *weight, *bias;  // (d,); bias may be null
  Rows x, residual;            // backward: their gradients; residual may be absent
  Rows out, normed;            // backward: out as forward left it, and the gradient of normed, which may be absent
  float* stats;                // (b, l, 1 or 2): 1 / deviation, mean if centred
  Rows dout;                   // backward only, like the rest; may be absent
  float *dweight, *dbias;      // (parts, d); dbias may be null

  int64_t rows() const { return b * l; }
};

// f(first channel, channels) over a row; the number is a constant in all vectors but the last.
template <typename F>
inline void each(int64_t d, F f) {
  int64_t c = 0;
  for (; c + W <= d; c += W) f(c, std::integral_constant<int64_t, W>());
  if (c < d) f(c, d - c);
}

inline Vec load(const float* row, int64_t c, int64_t count) {
  return count == W ? Vec::loadu(row + c) : Vec::loadu(row + c, count);
}

struct Task {
  const Norm& s;
  Buffer x, residual, out, normed, dout;  // one row each

  explicit Task(const Norm& norm)
      : s(norm), x(s.d), residual(s.d), out(s.d), normed(s.d), dout(s.d) {}

  const float* read(const Rows& from, int64_t sample, int64_t i, float* scratch) const {
    if (!from.data) return nullptr;
    if (from.dtype == kFloat) return from.at<float>(sample, i, 0);
    each(s.d, [&](int64_t c, int64_t count) { from.load(sample, i, c, count).store(scratch + c, count); });
    return scratch;
  }

  // Where to write row i; `wrote` then brings it to memory.
  float* target(const Rows& to, int64_t sample, int64_t i, float* scratch) const {
    return to.dtype == kFloat ? to.at<float>(sample, i, 0) : scratch;
  }
  void wrote(const Rows& to, int64_t sample, int64_t i, const float* row) const {
    if (to.data && (to.dtype != kFloat || to.at<float>(sample, i, 0) != row))
      each(s.d, [&](int64_t c, int64_t count) { to.store(sample, i, c, count, load(row, c, count)); });
  }

  template <typename F>
  float mean(F term) const {
    Vec sum(0.f);
    each(s.d, [&](int64_t c, auto count) { sum = sum + term(c, count); });
    return sum_lanes(sum) / s.d;
  }

  // No processor foresees permuted rows: bring row i of another sample to the second-level cache, in memory order.
  template <int to_write>
  void fetch(int64_t sample, int64_t i) const {
    if (!s.index || sample >= s.b) return;
    for (const Rows* rows : {&s.x, &s.residual}) {
      const int64_t size = rows->dtype == kFloat ? 4 : 2;
      const char* row = rows->data + (sample * rows->batch + i * rows->row) * size;
      for (int64_t k = 0; rows->data && k < s.d * size; k += 64) __builtin_prefetch(row + k, to_write, 2);
    }
  }

  void forward(int64_t sample, int64_t i) {
    fetch<0>(sample + 1, i);
    const int64_t source = s.index ? s.index[i] : i;
    const float *a = read(s.x, sample, source, x), *r = read(s.residual, sample, source, residual);
    float* total = target(s.out, sample, i, out);
    each(s.d, [&](int64_t c, auto count) {
      const Vec sum = r ? load(a, c, count) + load(r, c, count) : load(a, c, count);
      sum.store(total + c, count);
    });
    wrote(s.out, sample, i, total);
    const float* row = read(s.out, sample, i, out);  // the statistics are those of the rounded sum
    const float centre = s.centred ? mean([&](int64_t c, auto count) { return load(row, c, count); }) : 0.f;
    const float square = mean([&](int64_t c, auto count) {
      const Vec y = load(row, c, count) - Vec(centre);
      return count == W ? y * y : Vec::set(Vec(0.f), y * y, count);
    });
    const float scale = 1.f / std::sqrt(square + static_cast<float>(s.eps));
    float* y = target(s.normed, sample, i, normed);
    each(s.d, [&](int64_t c, auto count) {
      const Vec normal = (load(row, c, count) - Vec(centre)) * Vec(scale), w = load(s.weight, c, count);
      (s.bias ? fmadd(normal, w, load(s.bias, c, count)) : normal * w).store(y + c, count);
    });
    wrote(s.normed, sample, i, y);
    float* kept = s.stats + (sample * s.l + i) * (1 + s.centred);
    kept[0] = scale;
    if (s.centred) kept[1] = centre;
  }

  void backward(int64_t sample, int64_t i, float* dweight, float* dbias) {
    fetch<1>(sample + 1, i);
    const int64_t source = s.index ? s.index[i] : i;
    const float* up = read(s.dout, sample, i, dout);
    float* dx = target(s.x, sample, source, x);
    if (const float* dy = read(s.normed, sample, i, normed)) {
      const float *row = read(s.out, sample, i, out), *kept = s.stats + (sample * s.l + i) * (1 + s.centred);
      const Vec scale(kept[0]), centre(s.centred ? kept[1] : 0.f);
      Vec sum(0.f), product(0.f);
      each(s.d, [&](int64_t c, auto count) {
        const Vec g = load(dy, c, count), normal = (load(row, c, count) - centre) * scale;
        const Vec gw = g * load(s.weight, c, count);
        product = fmadd(gw, normal, product);
        sum = sum + gw;
        fmadd(g, normal, load(dweight, c, count)).store(dweight + c, count);
        if (dbias) (load(dbias, c, count) + g).store(dbias + c, count);
      });
      const Vec along(-sum_lanes(product) / s.d), shift(s.centred ? -sum_lanes(sum) / s.d : 0.f);
      each(s.d, [&](int64_t c, auto count) {
        const Vec normal = (load(row, c, count) - centre) * scale;
        const Vec d = fmadd(normal, along, fmadd(load(dy, c, count), load(s.weight, c, count), shift));
        (up ? fmadd(d, scale, load(up, c, count)) : d * scale).store(dx + c, count);
      });
    } else {
      each(s.d, [&](int64_t c, auto count) { (up ? load(up, c, count) : Vec(0.f)).store(dx + c, count); });
    }
    wrote(s.x, sample, source, dx);
    wrote(s.residual, sample, source, dx);
  }
};

template <bool with_gradient>
void run(const Norm& s) {
  const int64_t parts = (s.rows() + kRows - 1) / kRows;
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    Task task(s);
#pragma omp for schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
      float* dweight = s.dweight + part * s.d;
      float* dbias = s.dbias ? s.dbias + part * s.d : nullptr;
      if (with_gradient) std::fill_n(dweight, s.d, 0.f);
      if (with_gradient && dbias) std::fill_n(dbias, s.d, 0.f);
      int64_t sample = part * kRows / s.l, i = part * kRows % s.l;
      for (int64_t n = part * kRows; n < std::min(s.rows(), (part + 1) * kRows); ++n) {
        with_gradient ? task.backward(sample, i, dweight, dbias) : task.forward(sample, i);
        if (++i == s.l) i = 0, ++sample;
      }
    }
  }
}

}  // namespace
}  // namespace ssm

extern "C" {
__attribute__((visibility("default"))) int norm_part() { return ssm::kRows; }
__attribute__((visibility("default"))) void norm_forward(const ssm::Norm* norm) { ssm::run<false>(*norm); }
__attribute__((visibility("default"))) void norm_backward(const ssm::Norm* norm) { ssm::run<true>(*norm); }
}
