// What a query sees: the keys of its blocks, and their scores with masks, bias and dropout.
#pragma once

#include "tiles.h"

namespace {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr int GROUP = 8;  // panels whose scores are held at a time

typedef uint32_t Words __attribute__((vector_size(4 * W)));

// Sequences are padded to whole panels: `length` positions count, `padded` are there. Scores are in units of ln 2.
struct Problem {
    const int32_t *row_offsets, *columns;
    int64_t heads;  // of the layout
    int64_t batch, query_heads, key_heads, length, padded, size, block;
    const float* key_bias;  // [batch, padded]: 0, or −∞ for keys that nobody sees
    const float* bias;      // [bias_heads, 2 · padded] by query − key + padded − 1, or null
    int64_t bias_heads;
    float scale;
    int causal;
    int64_t threshold;  // 24 bits; 0: no dropout
    float kept;         // what dropout multiplies by
    int64_t seed, counter;
};

// The queries of a tile.
struct Tile {
    int64_t sample, head, query;
};

// The panels that a tile sees, in order.
class Panels {
   public:
    Panels(const Problem& problem, const Tile& tile) : block_(problem.block) {
        int64_t row = tile.query / block_, rows = (problem.padded + block_ - 1) / block_;
        const int32_t* offsets = problem.row_offsets + (problem.heads > 1 ? tile.head * (rows + 1) : 0) + row;
        at_ = problem.columns + offsets[0];
        end_ = problem.columns + offsets[1];
        limit_ = problem.causal ? tile.query + W : problem.padded;
    }

    // The first keys of the next panels, GROUP at most; returns how many.
    int next(int64_t (&keys)[GROUP]) {
        int found = 0;
        while (found < GROUP && at_ < end_) {
            int64_t key = *at_ * block_ + inside_;
            if (key >= limit_) break;  // as are those that follow
            keys[found++] = key;
            inside_ += PANEL;
            if (inside_ == block_) inside_ = 0, ++at_;
        }
        return found;
    }

   private:
    const int32_t *at_, *end_;
    int64_t block_, limit_, inside_ = 0;
};

// What dropout multiplies the weights of a tile by: the generator of rng.py, by the number of query and key.
class Dropout {
   public:
    Dropout(const Problem& p, const Tile& tile) : threshold_(Words{} + uint32_t(p.threshold)), kept_(all(p.kept)) {
        seed_low_ = Words{} + uint32_t(p.seed);
        seed_high_ = Words{} + uint32_t(uint64_t(p.seed) >> 32);
        for (int lane = 0; lane < W; ++lane) {
            int64_t row = (tile.sample * p.query_heads + tile.head) * p.length + tile.query + lane;
            uint64_t number = uint64_t(p.counter + row * p.length);
            low_[lane] = uint32_t(number);
            high_[lane] = uint32_t(number >> 32);
        }
    }

    Floats operator()(int64_t key) const {
        Words low = low_ + uint32_t(key);
        Words high = high_ - (Words)(low < low_);  // carries
        Words bits = mix(mix(low ^ seed_low_) ^ mix(high ^ seed_high_)) >> 8;
        return bits >= threshold_ ? kept_ : Floats{};
    }

   private:
    static Words mix(Words x) {
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = (x ^ (x >> 15)) * 0x846ca68bu;
        return x ^ (x >> 16);
    }

    Words threshold_, seed_low_, seed_high_, low_ = {}, high_ = {};
    Floats kept_;
};

// Where the bias of a tile's first query and a key lies; that of the next query follows.
inline int64_t bias_place(const Problem& problem, const Tile& tile, int64_t key) {
    int64_t head = problem.bias_heads > 1 ? tile.head : 0;
    return head * 2 * problem.padded + tile.query - key + problem.padded - 1;
}

// The scores of a panel, of queries that were multiplied by scale · log2 e; −∞ where a key is not seen.
inline void score(const Problem& problem, const Tile& tile, int64_t key, const float* keys, const float* queries,
                  Floats (&scores)[PANEL]) {
    dots(keys, queries, problem.size, scores);
    const float* key_bias = problem.key_bias + tile.sample * problem.padded + key;
    for (int r = 0; r < PANEL; ++r) scores[r] += all(key_bias[r]);
    if (problem.bias) {
        const float* bias = problem.bias + bias_place(problem, tile, key);
        for (int r = 0; r < PANEL; ++r) scores[r] += load<Floats>(bias - r);
    }
    if (problem.causal && key + PANEL - 1 > tile.query) {
        Ints query = {};
        for (int lane = 0; lane < W; ++lane) query[lane] = lane;
        for (int r = 0; r < PANEL; ++r)
            scores[r] = query < int(key + r - tile.query) ? all(-__builtin_inff()) : scores[r];
    }
}

// Keys or values of one head in fp32, a panel at a time. Other types are converted when first asked for.
template <typename Type>
class Rows {
   public:
    Rows(float* scratch, uint8_t* done, int64_t number, const Problem& problem)
        : room_(scratch + number * problem.padded * problem.size),
          done_(done + number * problem.padded / PANEL),
          problem_(problem) {}

    void begin(const typename Type::Element* from) {
        if (from == from_) return;
        from_ = from;
        memset(done_, 0, size_t(problem_.padded / PANEL));
    }

    const float* panel(int64_t row) {
        float* into = room_ + row * problem_.size;
        if (done_[row / PANEL]) return into;
        done_[row / PANEL] = 1;
        const typename Type::Element* from = from_ + row * problem_.size;
        for (int64_t i = 0; i < PANEL * problem_.size; i += W) store(into + i, Type::load(from + i));
        return into;
    }

   private:
    const typename Type::Element* from_ = nullptr;
    float* room_;
    uint8_t* done_;
    const Problem& problem_;
};

template <>
class Rows<Float32> {
   public:
    Rows(float*, uint8_t*, int64_t, const Problem& problem) : size_(problem.size) {}
    void begin(const float* from) { from_ = from; }
    const float* panel(int64_t row) const { return from_ + row * size_; }

   private:
    const float* from_ = nullptr;
    int64_t size_;
};

// Numbers that are given out to whichever thread is free.
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
