// Softmax over a window, the first tokens and heavy hitters, the tokens behind the window that got the most
// attention: what one token and many have in common. patches/h2o.py has the formulas.

#pragma once

#include <cmath>
#include <limits>

#include "key_head.h"
#include "window_head.h"

class HeavyHead : protected KeyHead<HeavyProblem> {
protected:
    struct Candidate {
        uint32_t weight;
        int column;
    };

    const float scaling_;
    const int size_, heavy_, sinks_, block_, first_, columns_;  // first_: column of the oldest in the window
    const int64_t seen_, count_;  // visible tokens before the call, and in it
    float* const kept_weight_;
    int32_t* const kept_rank_;
    Candidate *candidates_, *sorted_;

    HeavyHead(const HeavyProblem& p, float scaling, int64_t batch_head, int64_t extra_floats)
        : KeyHead(p, batch_head),
          scaling_(scaling),
          size_(p.window),
          heavy_(p.heavy),
          sinks_(p.sinks),
          block_(p.block),
          first_(sinks_ + heavy_),
          columns_(first_ + size_ + block_),
          seen_(at<int32_t>(p.seen)[row_]),
          count_(at<int32_t>(p.visible)[row_]),
          kept_weight_(at<float>(p.kept_weight) + batch_head * columns_),
          kept_rank_(at<int32_t>(p.kept_rank) + batch_head * columns_) {
        const int64_t most = heavy_ + block_;
        reserve(4 * most + extra_floats);
        candidates_ = alloc_of<Candidate>(2 * most);
        sorted_ = alloc_of<Candidate>(2 * most);
    }

    // Blocks that have left the window of the query of a rank.
    int64_t left(int64_t rank) const {
        const int64_t beyond = rank - sinks_ + 1 - size_;
        return beyond < 0 ? 0 : beyond / block_;
    }
    // Rank of the first query behind so many.
    int64_t begin(int64_t blocks) const { return blocks * block_ + size_ + sinks_ - 1; }
    int held(int64_t blocks) const { return static_cast<int>(std::min<int64_t>(heavy_, blocks * block_)); }

    // The column of the token of a rank, when so many blocks have left.
    int column_of(int64_t rank, int64_t blocks) const {
        return static_cast<int>(rank < sinks_ ? rank : rank + heavy_ - blocks * block_);
    }

    // Where a visible token stands in the call.
    int64_t place(int64_t token) const {
        return p_.order ? at<int32_t>(p_.order)[row_ * p_.length + token] : token;
    }

    // To 16 bits, as to_16_bits in patches/window/ring.py; of numbers not below 0 the bits are in their order.
    static uint32_t rounded(float x) {
        const uint32_t bits = bit_cast<uint32_t>(x);
        return (bits + 0x7f + (bits >> 8 & 1)) & ~0xffu;
    }

    // The columns that stay when a block leaves, most attention first, those too far back last; `blocks` have
    // left then. place_of(column) is where weights and ranks have it. Returns how many.
    template <class Place>
    int choose(int64_t blocks, const float* weights, const int32_t* ranks, Place place_of) {
        const int64_t oldest = p_.reach ? begin(blocks) - p_.reach : 0;
        int count = 0;
        for (int j = sinks_; j < sinks_ + held(blocks - 1); ++j) {
            const int place = place_of(j);
            candidates_[count++] = {ranks[place] < oldest ? 0 : 1 + rounded(weights[place]), j};
        }
        for (int j = first_; j < first_ + block_; ++j)
            candidates_[count++] = {1 + rounded(weights[place_of(j)]), j};
        for (int width = 1; width < count; width *= 2) {  // merges keep the order of equal ones
            for (int from = 0; from < count; from += 2 * width) {
                const int middle = std::min(from + width, count), to = std::min(from + 2 * width, count);
                std::merge(candidates_ + from, candidates_ + middle, candidates_ + middle, candidates_ + to,
                           sorted_ + from,
                           [](const Candidate& a, const Candidate& b) { return a.weight > b.weight; });
            }
            std::swap(candidates_, sorted_);
        }
        return std::min(count, heavy_);
    }

    char* kept(const Array& x, int column) const {
        return at<char>(x.data) + bytes_of(x) * offset(x, row_, head_, column);
    }
    static int64_t bytes_of(const Array& x) { return x.dtype == FLOAT32 ? 4 : 2; }

    // A token's key or value into a column that is kept.
    void keep(const Array& from, int64_t token, const Array& to, int column, int count) const {
        const char* source = at<char>(from.data) + bytes_of(from) * offset(from, row_, head_, token);
        memcpy(kept(to, column), source, bytes_of(to) * count);
    }
};
