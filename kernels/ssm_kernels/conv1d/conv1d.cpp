// Depthwise causal convolution with SiLU on channel-last rows: W channels per vector, a chunk of rows at a time.
//
// Backward recomputes the values before the activation. A chunk's last inputs also reach into the rows after it, so
// those few rows are computed in both chunks.
#include "../vector.h"

namespace ssm {
namespace {

constexpr int64_t kRows = 16;  // rows per chunk

// Mirrored by `Conv` in cpu.py.
struct Conv {
  int64_t b, d, l, width, parts, threads, silu, reverse;
  Rows x, out;                 // out: y, or its gradient in backward
  const float *weight, *bias;  // weight (width, d); bias may be null
  Rows dx;                     // backward only, like the rest
  float *dweight, *dbias;      // (b, width, d), (b, d)

  int64_t blocks() const { return (d + W - 1) / W; }
  int64_t position(int64_t step) const { return reverse ? l - 1 - step : step; }
};

// Rows are kept in scan order. Scratch row 0 of `x` is `width - 1` rows before the chunk.
struct Task {
  const Conv& s;
  const int64_t halo, sums;  // dweight rows and then one of dbias
  int64_t sample = 0, channel = 0, lanes = 0;
  Buffer x, g, weight, totals, tails;
  Vec bias;

  explicit Task(const Conv& conv)
      : s(conv), halo(conv.width - 1), sums(conv.width + 1), x((kRows + 2 * halo) * W), g((kRows + halo) * W),
        weight(s.width * W), totals((conv.blocks() / conv.parts + 1) * sums * W),
        tails((conv.blocks() / conv.parts + 1) * halo * W) {}

  Vec row(const Rows& from, int64_t t) const {
    return t < 0 || t >= s.l ? Vec(0.f) : from.load(sample, s.position(t), channel, lanes);
  }

  void enter(int64_t block) {
    channel = block * W;
    lanes = std::min(W, s.d - channel);
    for (int64_t k = 0; k < s.width; ++k) put(weight, k, Vec::loadu(s.weight + k * s.d + channel, lanes));
    bias = s.bias ? Vec::loadu(s.bias + channel, lanes) : Vec(0.f);
  }

  void load_x(int64_t start, int64_t rows) {
    for (int64_t i = 0; i < rows + halo; ++i) put(x, i, row(s.x, start - halo + i));
  }

  // The value before the activation at scratch row i.
  Vec before(int64_t i) const {
    Vec sum = bias;
    for (int64_t k = 0; k < s.width; ++k) sum = fmadd(get(x, i + k), get(weight, k), sum);
    return sum;
  }

  // Where the output takes x's place, the inputs before a chunk are those that the chunk before left in `tail`.
  void forward(int64_t start, int64_t rows, float* tail) {
    load_x(start, rows);
    for (int64_t i = 0; i < halo && s.x.data == s.out.data; ++i) {
      if (start) put(x, i, get(tail, i));
      put(tail, i, get(x, rows + i));
    }
    for (int64_t i = 0; i < rows; ++i) {
      Vec y = before(i);
      if (s.silu) y = y * sigmoid(y);
      s.out.store(sample, s.position(start + i), channel, lanes, y);
    }
  }

  void backward(int64_t start, int64_t rows, float* total) {
    load_x(start, rows + halo);
    for (int64_t i = 0; i < rows + halo; ++i) {
      Vec dy = row(s.out, start + i);
      if (s.silu) {
        const Vec y = before(i), q = sigmoid(y);
        dy = dy * q * fmadd(y, Vec(1.f) - q, Vec(1.f));
      }
      put(g, i, dy);
    }
    for (int64_t i = 0; i < rows; ++i) {
      Vec dx(0.f);
      for (int64_t k = 0; k < s.width; ++k) dx = fmadd(get(g, i + halo - k), get(weight, k), dx);
      s.dx.store(sample, s.position(start + i), channel, lanes, dx);
    }
    for (int64_t k = 0; k < sums; ++k) {
      Vec sum(0.f);  // per chunk first: one running fp32 sum over l would lose digits
      for (int64_t i = 0; i < rows; ++i) sum = k < s.width ? fmadd(get(g, i), get(x, i + k), sum) : sum + get(g, i);
      put(total, k, get(total, k) + sum);
    }
  }

  void store_sums(const float* total) const {
    for (int64_t k = 0; k < s.width; ++k)
      get(total, k).store(s.dweight + (sample * s.width + k) * s.d + channel, lanes);
    get(total, s.width).store(s.dbias + sample * s.d + channel, lanes);
  }

  // Chunk by chunk, and all blocks in a chunk: blocks are neighbours in memory.
  template <bool with_gradient>
  void run(int64_t of_sample, Part part) {
    sample = of_sample;
    if (with_gradient) std::fill_n(static_cast<float*>(totals), (part.end - part.begin) * sums * W, 0.f);
    for (int64_t start = 0; start < s.l; start += kRows)
      for (int64_t block = part.begin; block < part.end; ++block) {
        enter(block);
        const int64_t rows = std::min(kRows, s.l - start);
        with_gradient ? backward(start, rows, totals + (block - part.begin) * sums * W)
                      : forward(start, rows, tails + (block - part.begin) * halo * W);
      }
    for (int64_t block = part.begin; with_gradient && block < part.end; ++block) {
      enter(block);
      store_sums(totals + (block - part.begin) * sums * W);
    }
  }
};

template <bool with_gradient>
void run(const Conv& s) {
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    Task task(s);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < s.b * s.parts; ++i)
      task.run<with_gradient>(i / s.parts, Part(i % s.parts, s.parts, s.blocks()));
  }
}

}  // namespace
}  // namespace ssm

extern "C" {
__attribute__((visibility("default"))) void conv_forward(const ssm::Conv* conv) { ssm::run<false>(*conv); }
__attribute__((visibility("default"))) void conv_backward(const ssm::Conv* conv) { ssm::run<true>(*conv); }
}
