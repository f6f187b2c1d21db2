// One decoded token: it takes the place of the oldest one in a window, which goes over into the state of a
// linear attention, and its query sees both under one normaliser. All is written where it lies.

#pragma once

#include "head.h"
#include "window.h"

// Filled in by ops/native_step.py, in this order.
struct StepProblem {
    int64_t batch, heads, kv_heads, size, wide, columns, threads;
    Array query, key, value, output;  // of the token
    Array keys, values;               // the window, a ring of `columns`
    int64_t marks, marks_row;         // bool [B, columns], True at columns that count
    int64_t turn;                     // int64 [B]: the oldest column, the same in all rows
    int64_t valid, valid_row;         // bool [B, 1]: whether the token counts; 0 for all
    // of the linear attention: the query's and the oldest token's features, or what `map` makes them of
    int64_t map, features;
    Array rest_query, rest_key, rest_value;  // the oldest token's data 0 where it is as in the window
    int64_t S, z;       // float32 [B, Hkv, F, Dv] and [B, Hkv, F], dense; 0 for no such attention
    int64_t log_decay;  // float32 [B, Hkv, 1], dense, at most 0: of the oldest token; 0 for none
    Gate gate;          // in place of `log_decay`
    int64_t left_out;   // float32 [B, H, 1], dense: logarithm of what `rest_query` was divided by; 0 for none
    double eps;
};

class WindowStep : Pair<StepProblem> {
    static constexpr int TILE = 64;  // columns that are brought to float32 together

    const float scaling_;
    const int columns_, columns_row_, features_, features_row_;
    const int64_t place_;
    const bool *marks_, counts_;
    float *query_, *scores_, *numerator_, *tile_, *sum_, *top_;
    float *phi_q_, *phi_k_, *left_, *others_, *total_, *log_scale_, *S_, *z_;

public:
    WindowStep(const StepProblem& p, float scaling, int64_t pair)
        : Pair(p, pair),
          scaling_(scaling),
          columns_(p.columns),
          columns_row_(padded(columns_)),
          features_(p.features),
          features_row_(padded(features_)),
          place_(*at<int64_t>(p.turn)),
          marks_(at<bool>(p.marks) + row_ * p.marks_row),
          counts_(!p.valid || at<bool>(p.valid)[row_ * p.valid_row]) {
        const int64_t widest = std::max(size_row_, wide_row_);
        reserve(shared_ * (size_row_ + columns_row_ + features_row_ + 2 * wide_row_ + 4) + TILE * widest +
                2 * features_row_ + wide_row_ + features_ * wide_row_);
        query_ = matrix(shared_, size_row_);
        scores_ = matrix(shared_, columns_row_);
        numerator_ = matrix(shared_, wide_row_);
        tile_ = matrix(TILE, widest);
        sum_ = matrix(shared_, 1);
        top_ = matrix(shared_, 1);
        phi_q_ = matrix(shared_, features_row_);
        phi_k_ = matrix(1, features_row_);
        left_ = matrix(1, wide_row_);
        others_ = matrix(shared_, wide_row_);
        total_ = matrix(shared_, 1);
        log_scale_ = matrix(shared_, 1);
        z_ = matrix(1, features_row_);
        S_ = wide_ == wide_row_ ? nullptr : matrix(features_, wide_row_);
    }

    void run() {
        for (int64_t head = first_query(); head < last_query(); ++head) {
            float* query = query_ + (head - first_query()) * size_row_;
            read_row(p_.query, head, 0, query, size_, size_row_);
            scale(query, scaling_, size_row_);
        }
        if (p_.S) ask_the_rest();  // before its key is written over
        put(p_.key, p_.keys, size_);
        put(p_.value, p_.values, wide_);
        for (int from = 0; from < columns_; from += TILE) meet(from, std::min(TILE, columns_ - from));
        for (int i = 0; i < shared_; ++i) weigh(i);
        for (int from = 0; from < columns_; from += TILE) add(from, std::min(TILE, columns_ - from));
        for (int i = 0; i < shared_; ++i) write_row(i);
    }

private:
    bool seen(int column) const { return column == place_ ? counts_ : marks_[column]; }

    void put(const Array& from, const Array& to, int count) const {
        const int64_t bytes = to.dtype == FLOAT32 ? 4 : 2;
        char* target = at<char>(to.data) + bytes * to.at(row_, head_, place_);
        const char* source = at<char>(from.data) + bytes * from.at(row_, head_, 0);
        counts_ ? (void)memcpy(target, source, bytes * count) : (void)memset(target, 0, bytes * count);
    }

    // The oldest token goes over into the state, which every query reads.
    void ask_the_rest() {
        float *S = at<float>(p_.S) + pair_ * features_ * wide_, *z = at<float>(p_.z) + pair_ * features_;
        for (int d = 0; S_ && d < features_; ++d)
            read_dense(S + d * wide_, wide_, S_ + d * wide_row_, wide_row_);
        read_dense(z, features_, z_, features_row_);
        if (marks_[place_]) remember(S_ ? S_ : S);
        for (int d = 0; S_ && d < features_; ++d)
            memcpy(S + d * wide_, S_ + d * wide_row_, wide_ * sizeof(float));
        memcpy(z, z_, features_ * sizeof(float));
        for (int i = 0; i < shared_; ++i) {
            const int64_t head = first_query() + i, query = row_ * p_.heads + head;
            float* phi = phi_q_ + i * features_row_;
            read_row(p_.rest_query, head, 0, phi, features_, features_row_);
            log_scale_[i] = p_.left_out      ? at<float>(p_.left_out)[query]
                            : p_.map == ELU1 ? least_loss(phi, features_)
                                             : 0;
            feature_map(p_.map, p_.eps, true, phi, nullptr, features_);
            total_[i] = dot(phi, z_, features_row_);
        }
        product({phi_q_, features_row_, 1}, shared_, features_, S_ ? S_ : S, wide_row_, others_, wide_row_,
                wide_row_, false);
    }

    void remember(float* S) {
        const bool there = !p_.rest_key.data;
        read_row(there ? p_.keys : p_.rest_key, head_, there ? place_ : 0, phi_k_, features_, features_row_);
        feature_map(p_.map, p_.eps, false, phi_k_, nullptr, features_);
        read_row(there ? p_.values : p_.rest_value, head_, there ? place_ : 0, left_, wide_, wide_row_);
        const float decay = p_.log_decay     ? at<float>(p_.log_decay)[pair_]
                            : p_.gate.weight ? p_.gate.log_decay(head_, left_, wide_)
                                             : 0;
        const float remains = std::exp(decay);
        for (int d = 0; d < features_; ++d) {
            float* row = S + d * wide_row_;
            for (int e = 0; e < wide_row_; e += WIDTH)
                store(row + e, load(row + e) * remains + load(left_ + e) * phi_k_[d]);
        }
        for (int d = 0; d < features_row_; d += WIDTH)
            store(z_ + d, load(z_ + d) * remains + load(phi_k_ + d));
    }

    static void read_dense(const float* from, int count, float* to, int row) {
        memcpy(to, from, count * sizeof(float));
        for (int i = count; i < row; ++i) to[i] = 0;
    }

    struct Rows {
        const float* data;
        int64_t apart;
    };

    // Columns of the ring: where they lie if they are whole vectors of float32 there.
    Rows rows(const Array& ring, int from, int count, int size, int row) const {
        if (ring.dtype == FLOAT32 && size == row)
            return {at<float>(ring.data) + ring.at(row_, head_, from), ring.token};
        for (int j = 0; j < count; ++j) read_row(ring, head_, from + j, tile_ + j * row, size, row);
        return {tile_, row};
    }

    // Scores of some columns.
    void meet(int from, int count) {
        const Rows keys = rows(p_.keys, from, count, size_, size_row_);
        for (int i = 0; i < shared_; ++i)
            for (int j = 0; j < count; ++j)
                scores_[i * columns_row_ + from + j] =
                    seen(from + j) ? dot(query_ + i * size_row_, keys.data + j * keys.apart, size_row_)
                                   : NEVER;
    }

    // Scores to exponentials over that of the greatest.
    void weigh(int i) {
        float* scores = scores_ + i * columns_row_;
        for (int j = columns_; j < columns_row_; ++j) scores[j] = NEVER;
        Floats peak = all(std::numeric_limits<float>::lowest()), total = {};
        for (int j = 0; j < columns_row_; j += WIDTH) {
            const Floats given = load(scores + j);
            peak = given > peak ? given : peak;
        }
        top_[i] = greatest(peak);
        for (int j = 0; j < columns_row_; j += WIDTH) {
            const Floats weight = exp_of(load(scores + j) - top_[i]);
            store(scores + j, weight);
            total += weight;
        }
        sum_[i] = sum(total);
    }

    void add(int from, int count) {
        const Rows values = rows(p_.values, from, count, wide_, wide_row_);
        product({scores_ + from, columns_row_, 1}, shared_, count, values.data, values.apart, numerator_,
                wide_row_, wide_row_, from > 0);
    }

    void write_row(int i) {
        float* numerator = numerator_ + i * wide_row_;
        join(numerator, top_[i], sum_[i], others_ + i * wide_row_, p_.S ? total_[i] : 0, log_scale_[i],
             wide_row_);
        write(p_.output, p_.output.at(row_, first_query() + i, 0), wide_, numerator);
    }
};

// What all key heads of a row read is written when they are done.
inline void mark(const StepProblem& p) {
    int64_t* turn = at<int64_t>(p.turn);
    const int64_t place = turn[0];
    for (int64_t row = 0; row < p.batch; ++row) {
        at<bool>(p.marks)[row * p.marks_row + place] = !p.valid || at<bool>(p.valid)[row * p.valid_row];
        turn[row] = (place + 1) % p.columns;
    }
}
