// One decoder step on the CPU: packed rows of many sequences through all layers of a dense Llama-like model.
//
// Everything is built from one inner loop, `tile`: a few rows of fp32 activations times one panel of kPanel columns,
// summed in fp32. Weights are packed once into such panels, keep their bits (bf16 or fp32) and are widened in
// registers, so a step reads each weight byte once however few rows it has. Attention uses the same loop: a piece of a
// KV block becomes one panel of keys and one of values.
//
// One OpenMP team runs the whole step; phases are separated by barriers and share their work through a counter, so a
// thread that was interrupted does not hold up the others by a fixed share. Vectors are the compiler's generic ones:
// the same source is right on any CPU, and fast where -march=native finds wide registers.
//
// Nothing is checked here: the caller has checked all indices (`step_batch.py`).

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>
#ifdef ANTIPHON_PROFILE
#include <time.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows = 12;  // 24 sums, 4 widened weights, 2 broadcast activations: 30 of 32 registers
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kTileRows = 5;
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 4;
#endif
constexpr int kPanel = 2 * kLanes;
constexpr int kRowChunk = 8 * kTileRows;  // rows of one work item
constexpr int kKeys = 64;                 // keys looked at in one go
constexpr int kQueryRows = 8 * kTileRows; // query rows (tokens times heads of a group) of one attention item
constexpr int kPrefetch = 4096;           // bytes ahead: a panel's next page, which no hardware looks up in time
constexpr float kNever = -1e30f;

typedef float VF __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint32_t VU __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t VI __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint16_t VH __attribute__((vector_size(kLanes * 2), aligned(2)));

struct Bf16 {
  uint16_t bits;
};

inline float widen(float value) { return value; }
inline float widen(Bf16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline void narrow(float value, float* out) { *out = value; }
inline void narrow(float value, Bf16* out) {  // round to nearest even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  out->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline VF load(const float* from) { return *reinterpret_cast<const VF*>(from); }
inline VF load(const Bf16* from) {
  return (VF)(__builtin_convertvector(*reinterpret_cast<const VH*>(from), VU) << 16);
}
inline void store(float* to, VF value) { *reinterpret_cast<VF*>(to) = value; }
inline VF splat(float value) { return value - VF{}; }
inline VF choose(VI where, VF yes, VF no) { return (VF)((where & (VI)yes) | (~where & (VI)no)); }
template <int Distance, int... I>
inline VF swap_lanes(VF value, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(value, value, (I ^ Distance)...);
}
// Combines all lanes; every lane of `value` ends up with the result.
template <int Distance = kLanes / 2, class F>
inline float across_lanes(VF value, F combine) {
  value = combine(value, swap_lanes<Distance>(value, std::make_integer_sequence<int, kLanes>()));
  if constexpr (Distance > 1) return across_lanes<Distance / 2>(value, combine);
  return value[0];
}
inline VF maximum(VF a, VF b) { return choose(a > b, a, b); }
inline float sum(VF value) {
  return across_lanes(value, [](VF a, VF b) { return a + b; });
}

// e^x to about 2 ulp: 2^n times a polynomial on [-1/2, 1/2].
inline VF exponential(VF x) {
  x = choose(x < -87.0f, splat(-87.0f), x);
  x = choose(x > 88.0f, splat(88.0f), x);
  const VF t = x * 1.44269504088896341f;
  const VI n = __builtin_convertvector(t + choose(t < 0.0f, splat(-0.5f), splat(0.5f)), VI);
  const VF whole = __builtin_convertvector(n, VF);
  const VF f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  VF p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  return p * (VF)((n + 127) << 23);
}

// out[R][kPanel] += x[R][k] * panel. An fp32 panel is [k][kPanel]; a bf16 panel is [k / 2][kPanel][2], so that one
// 32-bit lane holds two consecutive k of a column and widening is one shift or one mask.
template <int R>
void tile(const float* x, int64_t ldx, const float* panel, int k, float* out, int64_t ldout) {
  VF sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = load(out + r * ldout), sums[r][1] = load(out + r * ldout + kLanes);
  for (int i = 0; i < k; ++i, panel += kPanel) {
    const VF left = load(panel), right = load(panel + kLanes);
    for (int r = 0; r < R; ++r) {
      const float value = x[r * ldx + i];
      sums[r][0] += left * value;
      sums[r][1] += right * value;
    }
  }
  for (int r = 0; r < R; ++r) store(out + r * ldout, sums[r][0]), store(out + r * ldout + kLanes, sums[r][1]);
}

template <int R>
void tile(const float* x, int64_t ldx, const Bf16* panel, int k, float* out, int64_t ldout) {
  VF sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = load(out + r * ldout), sums[r][1] = load(out + r * ldout + kLanes);
  const VU* pairs = reinterpret_cast<const VU*>(panel);
  for (int i = 0; i < k; i += 2, pairs += 2) {
    const VU left = pairs[0], right = pairs[1];
    __builtin_prefetch(reinterpret_cast<const char*>(pairs) + kPrefetch, 0, 2);
    __builtin_prefetch(reinterpret_cast<const char*>(pairs + 1) + kPrefetch, 0, 2);
    const VF left_even = (VF)(left << 16), left_odd = (VF)(left & 0xffff0000u);
    const VF right_even = (VF)(right << 16), right_odd = (VF)(right & 0xffff0000u);
    for (int r = 0; r < R; ++r) {
      const float even = x[r * ldx + i], odd = x[r * ldx + i + 1];
      sums[r][0] += left_even * even;
      sums[r][1] += right_even * even;
      sums[r][0] += left_odd * odd;
      sums[r][1] += right_odd * odd;
    }
  }
  for (int r = 0; r < R; ++r) store(out + r * ldout, sums[r][0]), store(out + r * ldout + kLanes, sums[r][1]);
}

template <class T>
using Tile = void (*)(const float*, int64_t, const T*, int, float*, int64_t);

template <class T, int... R>
constexpr std::array<Tile<T>, sizeof...(R)> tiles(std::integer_sequence<int, R...>) {
  return {static_cast<Tile<T>>(tile<R + 1>)...};
}
template <class T>
constexpr auto kTiles = tiles<T>(std::make_integer_sequence<int, kTileRows>());

// Calls use(first row, rows) for pieces of at most kTileRows rows, as equal as can be.
template <class F>
inline void split_rows(int rows, F use) {
  const int pieces = (rows + kTileRows - 1) / kTileRows;
  for (int i = 0; i < pieces; ++i) {
    const int first = int(int64_t(rows) * i / pieces), end = int(int64_t(rows) * (i + 1) / pieces);
    use(first, end - first);
  }
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

#ifdef ANTIPHON_PROFILE  // benchmarks/engine/profile_step.py: processor seconds of each phase of the last steps
constexpr int kProfiledPhases = 4096;
std::atomic<double> profile[kProfiledPhases];
inline double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}
#endif

// What the threads of a step share. Waiting threads spin for as long as phases usually differ, and then sleep: where
// other processes want the cores (a prefill worker beside a decode worker), a spinning thread would keep the very thread
// from running that it waits for.
struct Team {
  static constexpr int kSpins = 4000;  // some 40 microseconds
  std::vector<std::atomic<int>> counters;
  std::atomic<int> arrived{0}, round{0};

  explicit Team(int phases) : counters(phases) {}

  void wait(int threads) {
    const int now = round.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      round.store(now + 1, std::memory_order_release);
      round.notify_all();
      return;
    }
    for (int i = 0; i < kSpins; ++i) {
      if (round.load(std::memory_order_acquire) != now) return;
      relax();
    }
    round.wait(now, std::memory_order_acquire);
  }
};

// One thread's place in the step: all threads go through the same phases in the same order.
struct Worker {
  Team& team;
  int thread = omp_get_thread_num(), threads = omp_get_num_threads(), phase = 0;

  template <class F>
  void each(int items, F work) {
    std::atomic<int>& next = team.counters[phase];
#ifdef ANTIPHON_PROFILE
    const double before = cpu_seconds();
#endif
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) work(item);
#ifdef ANTIPHON_PROFILE
    profile[std::min(phase, kProfiledPhases - 1)] += cpu_seconds() - before;
#endif
    ++phase;
    team.wait(threads);
  }
};

template <class T>
struct Matrix {
  const T* panels;
  const float* bias;
  int columns;
  int k;
  const T* panel(int index) const { return panels + int64_t(index) * kPanel * k; }
};

enum class Then { kStore, kAdd };

template <class T>
void multiply(Worker& worker, const float* x, int rows, const Matrix<T>& matrix, float* y, int64_t ldy, Then then) {
  const int panels = (matrix.columns + kPanel - 1) / kPanel, chunks = (rows + kRowChunk - 1) / kRowChunk;
  worker.each(panels * chunks, [&](int item) {
    const int panel = item / chunks, row = item % chunks * kRowChunk, column = panel * kPanel;
    const int width = std::min(kPanel, matrix.columns - column);
    split_rows(std::min(kRowChunk, rows - row), [&](int first, int count) {
      alignas(64) float out[kTileRows * kPanel] = {};
      const float* from = x + int64_t(row + first) * matrix.k;
      kTiles<T>[count - 1](from, matrix.k, matrix.panel(panel), matrix.k, out, kPanel);
      for (int r = 0; r < count; ++r) {
        float* to = y + int64_t(row + first + r) * ldy + column;
        for (int c = 0; c < width; ++c) {
          const float value = out[r * kPanel + c] + (matrix.bias ? matrix.bias[column + c] : 0.0f);
          to[c] = then == Then::kAdd ? to[c] + value : value;
        }
      }
    });
  });
}

// y = silu(x * gate) * (x * up). Gate and up panels alternate, so both halves of a column meet in one work item.
template <class T>
void multiply_gated(Worker& worker, const float* x, int rows, const Matrix<T>& matrix, float* y) {
  const int panels = (matrix.columns + kPanel - 1) / kPanel, chunks = (rows + kRowChunk - 1) / kRowChunk;
  worker.each(panels * chunks, [&](int item) {
    const int panel = item / chunks, row = item % chunks * kRowChunk, column = panel * kPanel;
    const int width = std::min(kPanel, matrix.columns - column);
    split_rows(std::min(kRowChunk, rows - row), [&](int first, int count) {
      alignas(64) float gate[kTileRows * kPanel] = {}, up[kTileRows * kPanel] = {};
      const float* from = x + int64_t(row + first) * matrix.k;
      kTiles<T>[count - 1](from, matrix.k, matrix.panel(2 * panel), matrix.k, gate, kPanel);
      kTiles<T>[count - 1](from, matrix.k, matrix.panel(2 * panel + 1), matrix.k, up, kPanel);
      for (int i = 0; i < count * kPanel; i += kLanes) {
        const VF value = load(gate + i);
        store(gate + i, value / (1.0f + exponential(-value)) * load(up + i));
      }
      for (int r = 0; r < count; ++r)
        std::memcpy(y + int64_t(row + first + r) * matrix.columns + column, gate + r * kPanel, width * sizeof(float));
    });
  });
}

void rms_norm(const float* x, const float* weight, int size, float eps, float* out) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int i = 0; i < size; ++i) squares += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(squares / size + eps);
  for (int i = 0; i < size; ++i) out[i] = weight[i] * (x[i] * scale);
}

void rotate(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; ++i) {
    const float low = x[i], high = x[i + half];
    x[i] = low * cosine[i] - high * sine[i];
    x[i + half] = high * cosine[i] + low * sine[i];
  }
}

}  // namespace

extern "C" {

struct AntiphonPool {
  void* memory;  // [block][kv_head][layer][k|v][token][dim]
  int32_t bf16, layers, heads, kv_heads, head_dim, block_tokens;
};

struct AntiphonBatch {
  int32_t rows, sequences, table_width, samples;
  const int32_t *tokens, *positions, *row_start, *start, *tables, *sample_rows;
};

struct AntiphonLayer {
  const float *input_norm, *post_norm, *q_norm, *k_norm, *qkv_bias, *o_bias;
  const void *qkv, *o, *gate_up, *down;
  int32_t window;
};

struct AntiphonModel {
  AntiphonPool pool;
  int32_t hidden, intermediate, vocab, threads;
  float eps, scale, rope_scaling;
  const float *inv_freq, *final_norm;
  const void *embedding, *lm_head;
  const AntiphonLayer* layers;
};

}  // extern "C"

namespace {

template <class T>
T* pool_at(const AntiphonPool& pool, int block, int head, int layer, int value, int token) {
  const int64_t unit = ((int64_t(block) * pool.kv_heads + head) * pool.layers + layer) * 2 + value;
  return static_cast<T*>(pool.memory) + (unit * pool.block_tokens + token) * pool.head_dim;
}

// Which query rows of which sequence one attention item does, for every KV head.
struct Span {
  int sequence, row, tokens, position;
};

std::vector<Span> attention_spans(const AntiphonPool& pool, const AntiphonBatch& batch) {
  const int most = std::max(1, kQueryRows / (pool.heads / pool.kv_heads));
  std::vector<Span> spans;
  for (int s = 0; s < batch.sequences; ++s)
    for (int row = batch.row_start[s]; row < batch.row_start[s + 1]; row += most)
      spans.push_back({s, row, std::min(most, batch.row_start[s + 1] - row), batch.positions[row]});
  return spans;
}

struct AttentionScratch {
  std::vector<float> query, out, scores, values, top, total;
  std::vector<uint32_t> keys;
  AttentionScratch(int rows, int dim)
      : query(rows * dim), out(rows * dim), scores(rows * kKeys), values(kKeys * dim), top(rows), total(rows),
        keys(kKeys * dim) {}
};

template <class T>
void pack_keys(const T* keys, int count, int dim, void* panels) {
  constexpr int per_word = 4 / sizeof(T);
  const uint32_t* from = reinterpret_cast<const uint32_t*>(keys);
  uint32_t* to = static_cast<uint32_t*>(panels);
  const int words = dim / per_word;
  for (int first = 0; first < count; first += kPanel, to += words * kPanel, from += words * kPanel) {
    const int width = std::min(kPanel, count - first);
    for (int t = 0; t < width; ++t)
      for (int w = 0; w < words; ++w) to[w * kPanel + t] = from[t * words + w];
  }
}

// Decoding has so few query rows (the heads of one group) that making panels of keys and values would cost more than
// using them: each key and value row is widened in registers instead. A bf16 row comes out of that with the even and
// the odd elements of each kPanel apart; queries are put into that order before, results back after (`spread`).
constexpr int kFewRows = 8;

inline void widen_panel(const float* from, VF* low, VF* high) { *low = load(from), *high = load(from + kLanes); }
inline void widen_panel(const Bf16* from, VF* low, VF* high) {
  const VU pairs = *reinterpret_cast<const VU*>(from);
  *low = (VF)(pairs << 16), *high = (VF)(pairs & 0xffff0000u);
}
template <class T>
inline int spread(int d) {
  if (sizeof(T) == 4) return d;
  return d - d % kPanel + d % 2 * kLanes + d % kPanel / 2;
}

// The sums of kLanes vectors as one vector, in order. Two vectors whose partial sums lie in groups of G lanes become
// one with groups of G / 2.
template <int G, int... I>
inline VF merge_groups(VF a, VF b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / (G / 2) * G + I % (G / 2))...) +
         __builtin_shufflevector(a, b, (I / (G / 2) * G + I % (G / 2) + G / 2)...);
}
template <int Count>
inline VF sums_of(const VF* vectors) {
  if constexpr (Count == 1) {
    return *vectors;
  } else {
    return merge_groups<2 * kLanes / Count>(sums_of<Count / 2>(vectors), sums_of<Count / 2>(vectors + Count / 2),
                                            std::make_integer_sequence<int, kLanes>());
  }
}

template <class T>
inline void prefetch_panel(const T* from) {
  for (int i = 0; i < kPanel; i += 64 / int(sizeof(T))) __builtin_prefetch(from + i);
}

// `next`: the keys that are looked at after these, fetched meanwhile.
template <class T, int R>
void few_scores(const float* q, const T* keys, const T* next, int count, int dim, float* scores) {
  for (int first = 0; first < count; first += kLanes) {
    VF sums[R][kLanes] = {};
    for (int t = 0; t < std::min(kLanes, count - first); ++t, keys += dim, next += dim) {
      VF row[R] = {};
      for (int d = 0; d < dim; d += kPanel) {
        VF low, high;
        widen_panel(keys + d, &low, &high);
        prefetch_panel(next + d);
        for (int r = 0; r < R; ++r) row[r] += low * load(q + r * dim + d), row[r] += high * load(q + r * dim + d + kLanes);
      }
      for (int r = 0; r < R; ++r) sums[r][t] = row[r];
    }
    for (int r = 0; r < R; ++r) store(scores + r * kKeys + first, sums_of<kLanes>(sums[r]));
  }
}

template <class T, int R>
void few_values(const float* weights, const T* values, const T* next, int count, int dim, float* out) {
  for (int d = 0; d < dim; d += kPanel) {
    VF sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = load(out + r * dim + d), sums[r][1] = load(out + r * dim + d + kLanes);
    for (int t = 0; t < count; ++t) {
      VF low, high;
      widen_panel(values + t * dim + d, &low, &high);
      prefetch_panel(next + t * dim + d);
      for (int r = 0; r < R; ++r) sums[r][0] += low * weights[r * kKeys + t], sums[r][1] += high * weights[r * kKeys + t];
    }
    for (int r = 0; r < R; ++r) store(out + r * dim + d, sums[r][0]), store(out + r * dim + d + kLanes, sums[r][1]);
  }
}

template <class T>
struct Few {
  void (*scores)(const float*, const T*, const T*, int, int, float*);
  void (*values)(const float*, const T*, const T*, int, int, float*);
};
template <class T, int... R>
constexpr std::array<Few<T>, sizeof...(R)> few_rows(std::integer_sequence<int, R...>) {
  return {Few<T>{few_scores<T, R + 1>, few_values<T, R + 1>}...};
}
template <class T>
constexpr auto kFew = few_rows<T>(std::make_integer_sequence<int, kFewRows>());

// Turns the scores of one query row into weights and scales down what the row has summed so far. The row sees keys
// `low` to `high` of this piece's `count`.
void softmax_piece(float* score, int low, int high, int count, float* top, float* total, float* out, int dim) {
  if (low >= high) {
    std::fill_n(score, count, 0.0f);
    return;
  }
  std::fill_n(score, low, kNever);
  std::fill_n(score + high, kKeys - high, kNever);
  VF most = load(score);
  for (int t = kLanes; t < count; t += kLanes) most = maximum(load(score + t), most);
  const float new_top = std::max(*top, across_lanes(most, maximum));
  VF sums = {};
  for (int t = 0; t < count; t += kLanes) {
    const VF weight = exponential(load(score + t) - new_top);
    sums += weight;
    store(score + t, weight);
  }
  if (new_top > *top) {
    const float keep = std::exp(*top - new_top);
    *total *= keep;
    *top = new_top;
    for (int d = 0; d < dim; d += kLanes) store(out + d, load(out + d) * keep);
  }
  *total += sum(sums);
}

template <class T>
void attend(const AntiphonPool& pool, const AntiphonBatch& batch, int layer, int window, float scale, const Span& span,
            int head, const float* query, int64_t ldq, float* out, int64_t ldout, AttentionScratch& scratch) {
  const int dim = pool.head_dim, group = pool.heads / pool.kv_heads, rows = span.tokens * group;
  const bool few = rows <= kFewRows;
  float *q = scratch.query.data(), *o = scratch.out.data(), *s = scratch.scores.data();
  T* panels = reinterpret_cast<T*>(scratch.keys.data());
  for (int r = 0; r < rows; ++r) {
    const float* from = query + (span.row + r / group) * ldq + (head * group + r % group) * dim;
    for (int d = 0; d < dim; ++d) q[r * dim + (few ? spread<T>(d) : d)] = from[d] * scale;
  }
  std::fill_n(o, rows * dim, 0.0f);
  std::fill_n(scratch.top.data(), rows, kNever);
  std::fill_n(scratch.total.data(), rows, 0.0f);
  const int end = span.position + span.tokens;
  int first = window > 0 ? std::max(0, span.position - window + 1) : 0;
  for (int count; first < end; first += count) {
    const int slot = first % pool.block_tokens;
    count = std::min({kKeys, pool.block_tokens - slot, end - first});
    const int block = batch.tables[int64_t(span.sequence) * batch.table_width + first / pool.block_tokens];
    const T* keys = pool_at<T>(pool, block, head, layer, 0, slot);
    const T* values = pool_at<T>(pool, block, head, layer, 1, slot);
    const int after = std::min(first + count, end - 1);
    const int next = batch.tables[int64_t(span.sequence) * batch.table_width + after / pool.block_tokens];
    const T* next_keys = pool_at<T>(pool, next, head, layer, 0, after % pool.block_tokens);
    const T* next_values = pool_at<T>(pool, next, head, layer, 1, after % pool.block_tokens);
    if (few) {
      kFew<T>[rows - 1].scores(q, keys, next_keys, count, dim, s);
    } else {
      pack_keys(keys, count, dim, panels);
      for (int t = 0; t < count; ++t)
        for (int d = 0; d < dim; d += kLanes)
          store(&scratch.values[(int64_t(d / kPanel) * kKeys + t) * kPanel + d % kPanel], load(values + t * dim + d));
      std::fill_n(s, rows * kKeys, 0.0f);
      split_rows(rows, [&](int row, int n) {
        for (int t = 0; t < count; t += kPanel)
          kTiles<T>[n - 1](q + row * dim, dim, panels + t * dim, dim, s + row * kKeys + t, kKeys);
      });
    }
    for (int r = 0; r < rows; ++r) {
      const int position = span.position + r / group;
      const int low = window > 0 ? std::max(0, position - window + 1 - first) : 0;
      const int high = std::min(count, position + 1 - first);
      softmax_piece(s + r * kKeys, low, high, count, &scratch.top[r], &scratch.total[r], o + r * dim, dim);
    }
    if (few) {
      kFew<T>[rows - 1].values(s, values, next_values, count, dim, o);
    } else {
      split_rows(rows, [&](int row, int n) {
        for (int d = 0; d < dim; d += kPanel)
          kTiles<float>[n - 1](s + row * kKeys, kKeys, &scratch.values[d * kKeys], count, o + row * dim + d, dim);
      });
    }
  }
  for (int r = 0; r < rows; ++r) {
    float* to = out + (span.row + r / group) * ldout + (head * group + r % group) * dim;
    const float down = 1.0f / scratch.total[r];
    for (int d = 0; d < dim; ++d) to[d] = o[r * dim + (few ? spread<T>(d) : d)] * down;
  }
}

template <class T>
void store_row(const AntiphonPool& pool, const AntiphonBatch& batch, int layer, int row, int sequence, int head,
               const float* key, const float* value) {
  const int position = batch.positions[row];
  const int block = batch.tables[int64_t(sequence) * batch.table_width + position / pool.block_tokens];
  T* keys = pool_at<T>(pool, block, head, layer, 0, position % pool.block_tokens);
  T* values = pool_at<T>(pool, block, head, layer, 1, position % pool.block_tokens);
  for (int d = 0; d < pool.head_dim; ++d) narrow(key[d], keys + d), narrow(value[d], values + d);
}

std::vector<int> row_sequences(const AntiphonBatch& batch) {
  std::vector<int> sequence(batch.rows);
  for (int s = 0; s < batch.sequences; ++s)
    std::fill(sequence.begin() + batch.row_start[s], sequence.begin() + batch.row_start[s + 1], s);
  return sequence;
}

std::vector<AttentionScratch> attention_scratch(const AntiphonPool& pool, int threads) {
  const int rows = std::max(kQueryRows, pool.heads / pool.kv_heads);
  return std::vector<AttentionScratch>(threads, AttentionScratch(rows, pool.head_dim));
}

template <class T>
void step(const AntiphonModel& model, const AntiphonBatch& batch, float* logits) {
  const AntiphonPool& pool = model.pool;
  const int hidden = model.hidden, dim = pool.head_dim, half = dim / 2, rows = batch.rows, samples = batch.samples;
  const int q_size = pool.heads * dim, kv_size = pool.kv_heads * dim, qkv_size = q_size + 2 * kv_size;
  auto buffer = [](int64_t size) { return std::unique_ptr<float[]>(new float[size]); };
  const auto x = buffer(int64_t(rows) * hidden), normed = buffer(int64_t(rows) * hidden);
  const auto qkv = buffer(int64_t(rows) * qkv_size), attended = buffer(int64_t(rows) * q_size);
  const auto gated = buffer(int64_t(rows) * model.intermediate), cosine = buffer(rows * half), sine = buffer(rows * half);
  const auto last = buffer(int64_t(samples) * hidden), last_attended = buffer(int64_t(samples) * q_size);
  const std::vector<int> sequence = row_sequences(batch);
  const std::vector<Span> spans = attention_spans(pool, batch);
  std::vector<AttentionScratch> scratch = attention_scratch(pool, model.threads);
  Team team(pool.layers * 8 + 4);

#pragma omp parallel num_threads(model.threads)
  {
    Worker worker{team};
    worker.each(rows, [&](int row) {
      const T* from = static_cast<const T*>(model.embedding) + int64_t(batch.tokens[row]) * hidden;
      for (int i = 0; i < hidden; ++i) x[int64_t(row) * hidden + i] = widen(from[i]);
      for (int i = 0; i < half; ++i) {
        const float angle = float(batch.positions[row]) * model.inv_freq[i];
        cosine[row * half + i] = std::cos(angle) * model.rope_scaling;
        sine[row * half + i] = std::sin(angle) * model.rope_scaling;
      }
    });
    float *stream = x.get(), *attention = attended.get();
    int live = rows;
    auto norm = [&](const float* weight) {
      worker.each(live, [&](int row) {
        rms_norm(stream + int64_t(row) * hidden, weight, hidden, model.eps, &normed[int64_t(row) * hidden]);
      });
    };
    for (int index = 0; index < pool.layers; ++index) {
      const AntiphonLayer& layer = model.layers[index];
      norm(layer.input_norm);
      const Matrix<T> to_qkv{static_cast<const T*>(layer.qkv), layer.qkv_bias, qkv_size, hidden};
      multiply(worker, normed.get(), live, to_qkv, qkv.get(), qkv_size, Then::kStore);
      worker.each(rows, [&](int row) {
        float* q = &qkv[int64_t(row) * qkv_size];
        for (int head = 0; head < pool.heads + pool.kv_heads; ++head) {
          const float* weight = head < pool.heads ? layer.q_norm : layer.k_norm;
          if (weight) rms_norm(q + head * dim, weight, dim, model.eps, q + head * dim);
          rotate(q + head * dim, &cosine[row * half], &sine[row * half], half);
        }
        for (int head = 0; head < pool.kv_heads; ++head)
          store_row<T>(pool, batch, index, row, sequence[row], head, q + q_size + head * dim,
                       q + q_size + kv_size + head * dim);
      });
      const bool is_last = index + 1 == pool.layers;
      if (is_last && samples == 0) break;
      worker.each(int(spans.size()) * pool.kv_heads, [&](int item) {
        attend<T>(pool, batch, index, layer.window, model.scale, spans[item / pool.kv_heads], item % pool.kv_heads,
                  qkv.get(), qkv_size, attended.get(), q_size, scratch[worker.thread]);
      });
      if (is_last) {  // what follows is wanted for the sampling rows only
        worker.each(samples, [&](int i) {
          const int64_t row = batch.sample_rows[i];
          std::memcpy(&last[int64_t(i) * hidden], &x[row * hidden], hidden * sizeof(float));
          std::memcpy(&last_attended[int64_t(i) * q_size], &attended[row * q_size], q_size * sizeof(float));
        });
        stream = last.get(), attention = last_attended.get(), live = samples;
      }
      const Matrix<T> to_hidden{static_cast<const T*>(layer.o), layer.o_bias, hidden, q_size};
      multiply(worker, attention, live, to_hidden, stream, hidden, Then::kAdd);
      norm(layer.post_norm);
      const Matrix<T> gate_up{static_cast<const T*>(layer.gate_up), nullptr, model.intermediate, hidden};
      multiply_gated(worker, normed.get(), live, gate_up, gated.get());
      const Matrix<T> down{static_cast<const T*>(layer.down), nullptr, hidden, model.intermediate};
      multiply(worker, gated.get(), live, down, stream, hidden, Then::kAdd);
    }
    if (samples > 0) {
      norm(model.final_norm);
      const Matrix<T> head{static_cast<const T*>(model.lm_head), nullptr, model.vocab, hidden};
      multiply(worker, normed.get(), samples, head, logits, model.vocab, Then::kStore);
    }
  }
}

template <class T>
void attention(const AntiphonPool& pool, const AntiphonBatch& batch, int layer, int window, float scale, int threads,
               const float* query, const float* key, const float* value, float* out) {
  const int q_size = pool.heads * pool.head_dim, kv_size = pool.kv_heads * pool.head_dim;
  const std::vector<int> sequence = row_sequences(batch);
  const std::vector<Span> spans = attention_spans(pool, batch);
  std::vector<AttentionScratch> scratch = attention_scratch(pool, threads);
  Team team(2);
#pragma omp parallel num_threads(threads)
  {
    Worker worker{team};
    worker.each(batch.rows, [&](int row) {
      for (int head = 0; head < pool.kv_heads; ++head) {
        const int64_t at = int64_t(row) * kv_size + head * pool.head_dim;
        store_row<T>(pool, batch, layer, row, sequence[row], head, key + at, value + at);
      }
    });
    worker.each(int(spans.size()) * pool.kv_heads, [&](int item) {
      attend<T>(pool, batch, layer, window, scale, spans[item / pool.kv_heads], item % pool.kv_heads, query, q_size, out,
                q_size, scratch[worker.thread]);
    });
  }
}

template <class F>
int guarded(F work) {
  try {
    work();
    return 0;
  } catch (...) {  // only memory can run out; the caller raises MemoryError
    return 1;
  }
}

}  // namespace

extern "C" {

int32_t antiphon_panel() { return kPanel; }

#ifdef ANTIPHON_PROFILE
// Reads and clears what `count` phases took: the embedding, eight a layer, and the head.
void antiphon_profile(double* seconds, int32_t count) {
  for (int i = 0; i < std::min(count, kProfiledPhases); ++i) seconds[i] = profile[i].exchange(0.0);
}
#endif

// weight [columns][k], row-major, into panels first, first + every, ... of `out`. k is even.
void antiphon_pack(const void* weight, int32_t bf16, int32_t columns, int32_t k, int32_t first, int32_t every,
                   void* out) {
  const int per_word = bf16 ? 2 : 1, words = k / per_word, panels = (columns + kPanel - 1) / kPanel;
  const uint32_t* from = static_cast<const uint32_t*>(weight);
#pragma omp parallel for
  for (int panel = 0; panel < panels; ++panel) {
    uint32_t* to = static_cast<uint32_t*>(out) + (int64_t(panel) * every + first) * words * kPanel;
    for (int c = 0; c < kPanel; ++c) {
      const int column = panel * kPanel + c;
      for (int w = 0; w < words; ++w) to[w * kPanel + c] = column < columns ? from[int64_t(column) * words + w] : 0;
    }
  }
}

int antiphon_step(const AntiphonModel* model, const AntiphonBatch* batch, float* logits) {
  return guarded([&] {
    if (model->pool.bf16) {
      step<Bf16>(*model, *batch, logits);
    } else {
      step<float>(*model, *batch, logits);
    }
  });
}

// query [rows][heads][dim], key and value [rows][kv_heads][dim]: out as query.
int antiphon_attention(const AntiphonPool* pool, const AntiphonBatch* batch, int32_t layer, int32_t window, float scale,
                       int32_t threads, const float* query, const float* key, const float* value, float* out) {
  return guarded([&] {
    if (pool->bf16) {
      attention<Bf16>(*pool, *batch, layer, window, scale, threads, query, key, value, out);
    } else {
      attention<float>(*pool, *batch, layer, window, scale, threads, query, key, value, out);
    }
  });
}

}  // extern "C"
