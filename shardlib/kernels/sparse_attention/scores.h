// The keys of a query's blocks, and their scores with masks, bias and dropout.
#pragma once

#include "../common/counter.h"
#include "products.h"

namespace {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// One call. Sequences of `length` positions are padded to `padded`, whole panels. Scores are in units of ln 2.
struct Problem {
    const int32_t *row_offsets, *columns;
    int64_t heads;  // of the layout
    int64_t batch, query_heads, key_heads, length, padded, size, block;
    const float* key_bias;  // [batch, padded]: 0, or −∞ for keys that no query sees
    const float* bias;      // [bias_heads, 2 · padded] by key − query + padded − 1, or null
    int64_t bias_heads;
    float scale;
    int causal;
    int64_t threshold;  // 24 bits; 0: no dropout
    float kept;         // the factor of weights that dropout keeps
    int64_t seed, counter;
};

// 16 queries of one head: the first is `query`.
struct Tile {
    int64_t sample, head, query;
};

// Iterates over the panels that a tile sees, in order.
class Panels {
   public:
    Panels(const Problem& problem, const Tile& tile) : block_(problem.block) {
        int64_t row = tile.query / block_, rows = (problem.padded + block_ - 1) / block_;
        const int32_t* offsets = problem.row_offsets + (problem.heads > 1 ? tile.head * (rows + 1) : 0) + row;
        at_ = problem.columns + offsets[0];
        end_ = problem.columns + offsets[1];
        limit_ = problem.causal ? tile.query + TILE : problem.padded;
    }

    // Writes the first keys of the next panels, at most GROUP, and returns their number.
    int next(int64_t (&keys)[GROUP]) {
        int count = 0;
        while (count < GROUP && at_ < end_) {
            int64_t key = *at_ * block_ + inside_;
            if (key >= limit_) break;  // all later keys are beyond the limit too
            keys[count++] = key;
            inside_ += TILE;
            if (inside_ == block_) inside_ = 0, ++at_;
        }
        return count;
    }

   private:
    const int32_t *at_, *end_;
    int64_t block_, limit_, inside_ = 0;
};

inline Ints lanes() {
    Ints numbers = {};
    for (int lane = 0; lane < W; ++lane) numbers[lane] = lane;
    return numbers;
}

// Dropout's factors for the weights of a query and W keys: the generator of rng.py, indexed by the number of the weight.
inline Floats dropout(const Problem& p, const Tile& tile, int64_t query, int64_t key) {
    int64_t row = (tile.sample * p.query_heads + tile.head) * p.length + query;
    uint64_t number = uint64_t(p.counter + row * p.length + key);
    Words first = Words{} + uint32_t(number), low = first + (Words)lanes();
    Words high = Words{} + uint32_t(number >> 32) - (Words)(low < first);  // carries
    Words bits = mix(mix(low ^ uint32_t(p.seed)) ^ mix(high ^ uint32_t(uint64_t(p.seed) >> 32))) >> 8;
    return bits >= uint32_t(p.threshold) ? all(p.kept) : Floats{};
}

// The index of the bias of a query and a key; the next key's follows.
inline int64_t bias_index(const Problem& p, int64_t query, int64_t key) { return key - query + p.padded - 1; }

// The scores of a query and W keys, given their products; −∞ for keys that the query does not see.
inline Floats seen(const Problem& p, const Tile& tile, int64_t query, int64_t key, Floats product) {
    Floats score = fma(product, all(p.scale * LOG2E), load<Floats>(p.key_bias + tile.sample * p.padded + key));
    if (p.bias) {
        const float* bias = p.bias + (p.bias_heads > 1 ? tile.head : 0) * 2 * p.padded;
        score += load<Floats>(bias + bias_index(p, query, key));
    }
    if (p.causal && key + W - 1 > query) score = lanes() > int(query - key) ? all(-__builtin_inff()) : score;
    return score;
}

// Factors made of the panels of one head's keys or values, each on first use, for products that sum over columns or rows.
template <typename Type, bool columns>
class Source {
    typedef Products<Type> P;

   public:
    Source(typename P::Held* room, uint8_t* done, const Problem& problem) : room_(room), done_(done), problem_(problem) {}

    void begin(const typename Type::Element* from) {
        if (from == from_) return;
        from_ = from;
        memset(done_, 0, size_t(problem_.padded / TILE));
    }

    const typename P::Held* panel(int64_t row) {
        const typename Type::Element* from = from_ + row * problem_.size;
        if constexpr (!columns && P::AS_THEY_LIE) {
            return from;
        } else {
            typename P::Held* into = room_ + row * problem_.size;
            if (done_[row / TILE]) return into;
            done_[row / TILE] = 1;
            prefetch_next(from, problem_.size);
            (columns ? P::columns : P::rows)(from, problem_.size, into);
            return into;
        }
    }

   private:
    const typename Type::Element* from_ = nullptr;
    typename P::Held* room_;
    uint8_t* done_;
    const Problem& problem_;
};

// Sums over queries of the gradients of one head's keys and values; a panel is set to zero on first use.
class KeySums {
   public:
    KeySums(float* room, uint8_t* begun, const Problem& problem)
        : room_(room), begun_(begun), size_(problem.size), padded_(problem.padded) {}

    // Sums go to the thread's buffer [2, padded, size] if there is one, else to dk and dv directly.
    void begin(float* dk, float* dv) {
        dk_ = room_ ? room_ : dk;
        dv_ = room_ ? room_ + padded_ * size_ : dv;
        memset(begun_, 0, size_t(padded_ / TILE));
    }

    void ready(int64_t row) {
        if (begun_[row / TILE]) return;
        begun_[row / TILE] = 1;
        memset(dk_ + row * size_, 0, size_t(TILE * size_) * sizeof(float));
        memset(dv_ + row * size_, 0, size_t(TILE * size_) * sizeof(float));
    }

    // Calls body(offset, dk, dv) for all panels; the ones without queries are zero.
    template <typename Body>
    void end(const Body& body) {
        for (int64_t row = 0; row < padded_; row += TILE) {
            ready(row);
            body(row * size_, dk_ + row * size_, dv_ + row * size_);
        }
    }

    float* dk() const { return dk_; }
    float* dv() const { return dv_; }

   private:
    float *room_, *dk_ = nullptr, *dv_ = nullptr;
    uint8_t* begun_;
    int64_t size_, padded_;
};

// A counter from which free threads take the number of the next item of work.
class Queue {
   public:
    explicit Queue(int64_t count) : count_(count) {}
    bool take(int64_t& number) {
        number = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
        return number < count_;
    }

   private:
    int64_t next_ = 0, count_;
};

}  // namespace
