// One decoded token behind a window with heavy hitters: what is kept is written over in place.

#pragma once

#include "heavy_head.h"

class HeavyToken : HeavyHead {
    static constexpr int TILE = 64;  // columns that are brought to float32 together

    const int used_, row_of_scores_;
    float *query_, *near_, *scores_, *numerator_, *tile_, *got_;
    char* moved_;

    static int64_t scratch_floats(const HeavyProblem& p) {
        const int64_t shared = p.heads / p.kv_heads, key_row = padded(p.head_dim),
                      value_row = padded(p.value_dim), columns = padded(p.sinks + p.heavy + p.window + p.block),
                      widest = std::max(key_row, value_row);
        return shared * (2 * key_row + columns + value_row) + TILE * widest + columns + p.heavy * widest;
    }

public:
    HeavyToken(const HeavyProblem& p, float scaling, int64_t batch_head)
        : HeavyHead(p, scaling, batch_head, scratch_floats(p)),
          used_(column_of(seen_, left(seen_)) + 1),
          row_of_scores_(padded(used_)),
          query_(alloc(shared_, key_row_)),
          near_(alloc(shared_, key_row_)),
          scores_(alloc(shared_, row_of_scores_)),
          numerator_(alloc(shared_, value_row_)),
          tile_(alloc(TILE, std::max(key_row_, value_row_))),
          got_(alloc(1, row_of_scores_)),
          moved_(reinterpret_cast<char*>(alloc(heavy_, std::max(key_row_, value_row_)))) {}

    void run() {
        if (!count_) return;
        const int64_t blocks = left(seen_);
        if (blocks && seen_ == begin(blocks)) evict(blocks);
        const int column = used_ - 1;
        keep(p_.key, place(0), p_.kept_key, column, head_dim_);
        keep(p_.value, place(0), p_.kept_value, column, value_dim_);
        kept_weight_[column] = 0;
        kept_rank_[column] = static_cast<int32_t>(seen_);
        read_query(p_.query, query_);
        if (p_.near.data) read_query(p_.near, near_);
        for (int from = 0; from < used_; from += TILE) score(from, std::min(TILE, used_ - from));
        hide(blocks);
        memset(got_, 0, row_of_scores_ * sizeof(float));
        for (int i = 0; i < shared_; ++i) softmax_row(scores_ + i * row_of_scores_);
        for (int from = 0; from < used_; from += TILE) add_values(from, std::min(TILE, used_ - from));
        for (int64_t head = first_query(); head < last_query(); ++head)
            write(p_.output, offset(p_.output, row_, head, place(0)), value_dim_,
                  numerator_ + (head - first_query()) * value_row_);
        const float fade = static_cast<float>(p_.fade);
        for (int j = 0; j < used_; ++j) kept_weight_[j] = kept_weight_[j] * fade + got_[j];
    }

private:
    void read_query(const Array& from, float* to) const {
        for (int64_t head = first_query(); head < last_query(); ++head, to += key_row_) {
            read_row(from, head, place(0), to, head_dim_, key_row_);
            scale(to, scaling_, key_row_);
        }
    }

    void evict(int64_t blocks) {
        const int chosen = choose(blocks, kept_weight_, kept_rank_, [](int column) { return column; });
        move(kept(p_.kept_key, 0), bytes_of(p_.kept_key) * head_dim_, bytes_of(p_.kept_key) * p_.kept_key.token,
             chosen);
        move(kept(p_.kept_value, 0), bytes_of(p_.kept_value) * value_dim_,
             bytes_of(p_.kept_value) * p_.kept_value.token, chosen);
        move(reinterpret_cast<char*>(kept_weight_), sizeof(float), sizeof(float), chosen);
        move(reinterpret_cast<char*>(kept_rank_), sizeof(int32_t), sizeof(int32_t), chosen);
    }

    // The chosen columns to the front, the window a block on, 0 behind it.
    void move(char* columns, int64_t bytes, int64_t stride, int chosen) {
        for (int j = 0; j < chosen; ++j)
            memcpy(moved_ + j * bytes, columns + candidates_[j].column * stride, bytes);
        for (int j = 0; j < chosen; ++j) memcpy(columns + (sinks_ + j) * stride, moved_ + j * bytes, bytes);
        for (int j = first_; j < first_ + size_; ++j)
            memcpy(columns + j * stride, columns + (j + block_) * stride, bytes);
        for (int j = first_ + size_; j < columns_; ++j) memset(columns + j * stride, 0, bytes);
    }

    void score(int from, int count) {
        const Rows keys = rows_of(p_.kept_key, from, count, head_dim_, key_row_, tile_);
        for (int i = 0; i < shared_; ++i) {
            float* scores = scores_ + i * row_of_scores_ + from;
            dots(query_ + i * key_row_, keys.data, keys.stride, count, key_row_, scores);
            for (int j = 0; p_.near.data && from + j < sinks_ && j < count; ++j)
                scores[j] = dot(near_ + i * key_row_, keys.data + j * keys.stride, key_row_);
        }
    }

    // Columns of heavy hitters that hold none yet, and what fills the last vector.
    void hide(int64_t blocks) {
        for (int i = 0; i < shared_; ++i) {
            float* scores = scores_ + i * row_of_scores_;
            for (int j = sinks_ + held(blocks); j < std::min(first_, used_); ++j)
                scores[j] = NEGATIVE_INFINITY;
            for (int j = used_; j < row_of_scores_; ++j) scores[j] = NEGATIVE_INFINITY;
        }
    }

    void softmax_row(float* scores) {
        const float factor = 1 / exponentials(scores, row_of_scores_, scores).sum;
        for (int j = 0; j < row_of_scores_; j += WIDTH) {
            const Floats weight = load(scores + j) * factor;
            store(scores + j, weight);
            store(got_ + j, load(got_ + j) + weight);
        }
    }

    void add_values(int from, int count) {
        const Rows values = rows_of(p_.kept_value, from, count, value_dim_, value_row_, tile_);
        product({scores_ + from, row_of_scores_, 1}, shared_, count, values.data, values.stride, numerator_,
                value_row_, value_row_, from > 0);
    }
};
