// Gradients of the forward, recomputed chunk by chunk from the last to the first: the formulas are in
// ops/eager/chunked_backward.py.

#pragma once

#include <vector>

#include "linear_head.h"
#include "tiles.h"

// What gradients need, causal or not. `S_transposed_` is the transpose of S, or of its gradient.
//
// Of floats, g is the gradient of the numerator. Pairs of bfloat16 are those of the output, which lose
// nothing where they come in it, and what they are multiplied to is divided by the totals.
template <class Element>
class LinearGradients : protected LinearHead {
protected:
    static constexpr bool ROUNDED = STEPS<Element> != 1;

    const int heads_;
    float *g_, *output_, *derivatives_, *d_query_, *d_key_, *d_value_, *S_transposed_, *t_, *inverse_;
    Element *query_columns_, *g_columns_, *key_rows_, *value_rows_, *S_columns_, *S_transposed_columns_;
    State sums_;  // of the head whose turn it is

    static Element* elements(int64_t count) { return alloc_of<Element>(count); }

    LinearGradients(const LinearProblem& p, float eps, int64_t batch_head, int heads, int64_t extra_floats)
        : LinearHead(p, eps, batch_head, scratch_floats(p, heads) + extra_floats),
          heads_(heads),
          g_(alloc(chunk_row_, value_row_)),
          output_(alloc(1, value_row_)),
          derivatives_(alloc(chunk_row_, key_row_)),
          d_query_(alloc(chunk_row_, key_row_)),
          d_key_(alloc(chunk_row_, key_row_)),
          d_value_(alloc(chunk_row_, value_row_)),
          S_transposed_(alloc(value_row_, key_row_)),
          t_(alloc(1, chunk_row_)),
          inverse_(alloc(ROUNDED, chunk_row_)),
          query_columns_(elements(across_size<Element>(chunk_row_, key_row_))),
          g_columns_(elements(across_size<Element>(chunk_row_, value_row_))),
          key_rows_(elements(along_size<Element>(chunk_row_, key_row_))),
          value_rows_(elements(along_size<Element>(chunk_row_, value_row_))),
          S_columns_(elements(across_size<Element>(key_row_, value_row_))),
          S_transposed_columns_(elements(S_transposed_size(key_row_, value_row_))) {}

    static int64_t scratch_floats(const LinearProblem& p, int heads) {
        const int64_t n = chunk_row(p), key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        return n * (3 * key_row + 2 * value_row + ROUNDED + 1) + value_row + key_row * value_row +
               heads * state_floats(p) + across_size<Element>(n, key_row) +
               across_size<Element>(n, value_row) + along_size<Element>(n, key_row) +
               along_size<Element>(n, value_row) + across_size<Element>(key_row, value_row) +
               S_transposed_size(key_row, value_row);
    }

    // Of floats it is S_transposed_ itself.
    static int64_t S_transposed_size(int64_t key_row, int64_t value_row) {
        return ROUNDED ? transposed_size<Element>(key_row, value_row) : 0;
    }

    float* derivatives() const { return p_.feature_map == NONE ? nullptr : derivatives_; }
    float* d_decay(int64_t start) const { return at<float>(p_.d_decay) + batch_head_ * p_.length + start; }

    // g and t of a chunk.
    void read_output_gradient(int64_t head, int64_t start, int count) {
        for (int i = 0; i < count; ++i) {
            float* g = g_ + i * value_row_;
            const int64_t index = query_offset(head, start + i);
            read_row(p_.d_output, head, start + i, g, value_dim_, value_row_);
            if (p_.normalise) {
                const float total = at<float>(p_.total)[index], inverse = total > 0 ? 1 / total : 0;
                if (ROUNDED) inverse_[i] = inverse;
                else scale(g, inverse, value_row_);
            }
            float& d_total = t_[i];
            d_total = p_.d_total ? at<float>(p_.d_total)[index] : 0;
            if (!p_.normalise) continue;
            read_row(p_.output, head, start + i, output_, value_dim_, value_row_);
            d_total -= dot(g, output_, value_row_) * inverse(i);
        }
    }

    // What g of a row is to be multiplied by.
    float inverse(int row) const { return ROUNDED && p_.normalise ? inverse_[row] : 1; }

    // R = sum_i phi(q_i) g_i^T and r = sum_i t_i phi(q_i), or more of them; the queries are written over.
    void add_to_state_gradient(int count, const Element* g) {
        for (int d = 0; d < key_row_; d += WIDTH) {
            Floats total = sums_.empty ? Floats{} : load(sums_.z + d);
            for (int i = 0; i < count; ++i) total += load(query_ + i * key_row_ + d) * t_[i];
            store(sums_.z + d, total);
        }
        if (ROUNDED && p_.normalise)
            for (int i = 0; i < count; ++i) scale(query_ + i * key_row_, inverse_[i], key_row_);
        const Element* queries = across_rows(query_, key_row_, count, key_row_, query_columns_);
        product(Factor<Element>{queries, 1, key_row_}, head_dim_, steps<Element>(count), g, value_row_,
                sums_.S, value_row_, value_row_, !sums_.empty);
        sums_.empty = false;
    }

    // Gradients of the keys and values of a chunk through the state, by which later queries see them.
    void gradients_through_state(int count) {
        if (sums_.empty) {
            memset(d_key_, 0, chunk_row_ * key_row_ * sizeof(float));
            memset(d_value_, 0, chunk_row_ * value_row_ * sizeof(float));
            return;
        }
        Element* S_transposed = S_transposed_columns_;
        if constexpr (!ROUNDED) S_transposed = S_transposed_;
        transposed(sums_.S, value_row_, key_row_, value_row_, S_transposed, key_row_);
        for (int j = 0; j < count; ++j) memcpy(d_key_ + j * key_row_, sums_.z, key_row_ * sizeof(float));
        product(along_rows(value_, value_row_, count, value_row_, value_rows_), count,
                steps<Element>(value_dim_), S_transposed, key_row_, d_key_, key_row_, key_row_, true);
        const Element* S = across_rows(sums_.S, value_row_, head_dim_, value_row_, S_columns_);
        product(along_rows(key_, key_row_, count, key_row_, key_rows_), count, steps<Element>(head_dim_), S,
                value_row_, d_value_, value_row_, value_row_, false);
    }

    void write_key_gradients(int64_t start, int count) {
        float* key_derivatives = derivatives();
        for (int j = 0; j < count; ++j) {
            float *d_key = d_key_ + j * key_row_, *d_value = d_value_ + j * value_row_;
            if (hidden(start + j)) {
                memset(d_key, 0, key_row_ * sizeof(float));
                memset(d_value, 0, value_row_ * sizeof(float));
                if (key_derivatives) memset(key_derivatives + j * key_row_, 0, key_row_ * sizeof(float));
            }
            if (p_.d_decay) d_decay(start)[j] -= dot(d_key, key_ + j * key_row_, key_row_);
            if (decay_.split) scale(d_key, decay_.key[j], key_row_);
            write_times_derivative(p_.d_key, head_, start, j, d_key, key_derivatives);
            write(p_.d_value, offset(p_.d_value, row_, head_, start + j), value_dim_, d_value);
        }
    }

    void write_times_derivative(const Array& to, int64_t head, int64_t start, int row, float* gradient,
                                const float* derivatives) const {
        if (derivatives)
            for (int d = 0; d < key_row_; d += WIDTH)
                store(gradient + d, load(gradient + d) * load(derivatives + row * key_row_ + d));
        write(to, offset(to, row_, head, start + row), head_dim_, gradient);
    }
};

template <class Element>
class LinearBackward : LinearGradients<Element> {
    using Base = LinearGradients<Element>;
    using Base::p_, Base::row_, Base::chunk_, Base::chunk_row_, Base::head_dim_, Base::value_dim_;
    using Base::key_row_, Base::value_row_, Base::query_, Base::key_, Base::value_, Base::decay_;
    using Base::elements, Base::query_columns_, Base::g_columns_, Base::S_transposed_columns_;
    using Base::g_, Base::d_query_, Base::d_key_, Base::d_value_, Base::S_transposed_, Base::sums_;
    using Base::heads_, Base::t_;

    Element *key_transposed_, *value_transposed_, *query_rows_, *g_rows_, *key_columns_, *value_columns_;
    Element *score_columns_, *d_score_columns_, *d_score_rows_;
    float *scores_, *d_scores_, *query_derivatives_;
    const int64_t chunks_ = chunks(p_);
    const int64_t span_ = chunks_in_span(p_, heads_);
    std::vector<State> states_, firsts_, before_;  // of each head: gradients, and transposes of what lies
                                                   // before each span, and before each chunk of one

    static int64_t chunks(const LinearProblem& p) {
        return (p.length + Base::longest(p) - 1) / Base::longest(p);
    }

    // All where their states take little memory, else as many as there are spans.
    static int64_t chunks_in_span(const LinearProblem& p, int heads) {
        constexpr int64_t FLOATS = 5 << 20;
        const int64_t few = FLOATS / (heads * Base::state_floats(p));
        return std::min(chunks(p), std::max<int64_t>({1, few, int64_t(std::sqrt(chunks(p)))}));
    }

    static int64_t scratch_floats(const LinearProblem& p, int heads) {
        const int64_t n = Base::chunk_row(p), key_row = padded(p.head_dim), value_row = padded(p.value_dim);
        const int64_t span = chunks_in_span(p, heads), states = (chunks(p) + span - 1) / span + span - 1;
        return heads * states * Base::state_floats(p) + n * (key_row + 2 * n) +
               transposed_size<Element>(n, key_row) + transposed_size<Element>(n, value_row) +
               along_size<Element>(n, key_row) + along_size<Element>(n, value_row) +
               across_size<Element>(n, key_row) + across_size<Element>(n, value_row) +
               2 * across_size<Element>(n, n) + along_size<Element>(STRIP<Element>, n);
    }

public:
    LinearBackward(const LinearProblem& p, float eps, int64_t batch_head, int heads)
        : Base(p, eps, batch_head, heads, scratch_floats(p, heads)),
          key_transposed_(elements(transposed_size<Element>(chunk_row_, key_row_))),
          value_transposed_(elements(transposed_size<Element>(chunk_row_, value_row_))),
          query_rows_(elements(along_size<Element>(chunk_row_, key_row_))),
          g_rows_(elements(along_size<Element>(chunk_row_, value_row_))),
          key_columns_(elements(across_size<Element>(chunk_row_, key_row_))),
          value_columns_(elements(across_size<Element>(chunk_row_, value_row_))),
          score_columns_(elements(across_size<Element>(chunk_row_, chunk_row_))),
          d_score_columns_(elements(across_size<Element>(chunk_row_, chunk_row_))),
          d_score_rows_(elements(along_size<Element>(STRIP<Element>, chunk_row_))),
          scores_(this->alloc(chunk_row_, chunk_row_)),
          d_scores_(this->alloc(chunk_row_, chunk_row_)),
          query_derivatives_(this->alloc(chunk_row_, key_row_)) {
        new_states(states_, 1);
        new_states(firsts_, (chunks_ + span_ - 1) / span_);
        new_states(before_, span_ - 1);
    }

    void run() {
        load_states();
        for (int64_t first = span_; first < chunks_; first += span_) {
            State* after = firsts_.data() + first / span_ * heads_;
            copy_states(after - heads_, after);
            for (int64_t chunk = first - span_; chunk < first; ++chunk) add_chunk(after, chunk);
        }
        for (int64_t first = (chunks_ - 1) / span_ * span_; first >= 0; first -= span_) {
            const int64_t last = std::min(chunks_, first + span_) - 1;
            State *begin = firsts_.data() + first / span_ * heads_, *state = begin;
            for (int64_t chunk = first; chunk < last; ++chunk) {
                State* after = before_.data() + (chunk - first) * heads_;
                copy_states(state, after);
                add_chunk(state = after, chunk);
            }
            for (int64_t chunk = last; chunk >= first; --chunk) {
                const State* before = chunk == first ? begin : before_.data() + (chunk - first - 1) * heads_;
                this->for_each_head(heads_, [&](int index) {
                    sums_ = states_[index];
                    gradients(before[index], chunk * chunk_, tokens(chunk));
                    states_[index] = sums_;
                });
            }
        }
        if (p_.S)
            this->for_each_head(heads_, [&](int i) { this->store_state(states_[i], p_.d_S, p_.d_z); });
    }

private:
    void new_states(std::vector<State>& states, int64_t count) {
        states.reserve(count * heads_);
        for (int64_t i = 0; i < count * heads_; ++i)
            states.push_back({this->alloc(key_row_, value_row_), this->alloc(key_row_, 1), true});
    }

    float* query_derivatives() const { return p_.feature_map == NONE ? nullptr : query_derivatives_; }
    int tokens(int64_t chunk) const { return std::min<int64_t>(chunk_, p_.length - chunk * chunk_); }

    // The gradients of the state after all, and the transpose of S before.
    void load_states() {
        this->for_each_head(heads_, [&](int i) {
            this->load_state(states_[i], p_.d_S_after, p_.d_z_after);
            State& first = firsts_[i];
            this->load_state(first, p_.S, p_.z);
            if (first.empty) return;
            transpose(first.S, value_row_, key_row_, value_row_, S_transposed_, key_row_);
            memcpy(first.S, S_transposed_, key_row_ * value_row_ * sizeof(float));
        });
    }

    void copy_states(const State* from, State* to) const {
        for (int i = 0; i < heads_; ++i) {
            memcpy(to[i].S, from[i].S, key_row_ * value_row_ * sizeof(float));
            memcpy(to[i].z, from[i].z, key_row_ * sizeof(float));
            to[i].empty = from[i].empty;
        }
    }

    // Add the keys and values of a chunk to the transposed states of the heads.
    void add_chunk(State* states, int64_t chunk) {
        this->for_each_head(heads_, [&](int index) {
            State& state = states[index];
            const int count = tokens(chunk);
            const bool add = !state.empty;
            this->read_decay(chunk * chunk_, count);
            this->read_keys(chunk * chunk_, count);
            this->update_state(state.S, state.z, state.empty, count, [&] {
                const Element* values = across_rows(value_, value_row_, count, value_row_, value_columns_);
                const Element* keys = across_rows(key_, key_row_, count, key_row_, key_columns_);
                product(Factor<Element>{values, 1, value_row_}, value_dim_, steps<Element>(count), keys,
                        key_row_, state.S, key_row_, key_row_, add);
                this->add_keys(state.z, count, add);
            });
            state.empty = false;
        });
    }

    void write_query_gradients(int64_t head, int64_t start, int first, int rows) {
        for (int m = first; m < first + rows; ++m) {
            float* row = d_query_ + m * key_row_;
            if (p_.d_decay) this->d_decay(start)[m] += dot(row, query_ + m * key_row_, key_row_);
            if (decay_.split) scale(row, decay_.query[m], key_row_);
            this->write_times_derivative(p_.d_query, head, start, m, row, query_derivatives());
        }
    }

    // Of a chunk of one head; that of the state after it is carried on.
    void gradients(const State& before, int64_t start, int count) {
        this->read_decay(start, count);
        this->read_keys(start, count, this->derivatives());
        transposed(key_, key_row_, padded(count), key_row_, key_transposed_, chunk_row_);
        transposed(value_, value_row_, padded(count), value_row_, value_transposed_, chunk_row_);
        if (decay_.split) this->apply_decay(sums_.S, sums_.z, sums_.empty);
        this->gradients_through_state(count);
        if (decay_.pairwise && !sums_.empty)
            for (int j = 0; j < count; ++j) {
                scale(d_key_ + j * key_row_, decay_.key[j], key_row_);
                scale(d_value_ + j * value_row_, decay_.key[j], value_row_);
            }
        if (decay_.pairwise) this->apply_decay(sums_.S, sums_.z, sums_.empty);
        const Element *keys = across_rows(key_, key_row_, count, key_row_, key_columns_), *S = nullptr;
        if (!before.empty) S = across_rows(before.S, key_row_, value_dim_, key_row_, S_transposed_columns_);
        for (int64_t head = this->first_query(); head < this->last_query(); ++head)
            query_gradients(head, start, count, keys, S, before.z);
        this->write_key_gradients(start, count);
    }

    // Of the queries of a head, and what they add to those of keys, values and state.
    void query_gradients(int64_t head, int64_t start, int count, const Element* keys, const Element* S,
                         const float* z) {
        this->read_queries(head, start, count, query_derivatives());
        this->read_output_gradient(head, start, count);
        const Factor<Element> queries = along_rows(query_, key_row_, count, key_row_, query_rows_);
        const Factor<Element> d_numerator = along_rows(g_, value_row_, count, value_row_, g_rows_);
        const Element* queries_across = across_rows(query_, key_row_, count, key_row_, query_columns_);
        const Element* g_across = across_rows(g_, value_row_, count, value_row_, g_columns_);
        for (int i = 0; i < count; i += STRIP<Element>) {
            const int rows = std::min(STRIP<Element>, count - i), seen = i + rows, columns = padded(seen);
            rows_of_product(queries, i, rows, steps<Element>(head_dim_), key_transposed_, chunk_row_, scores_,
                            chunk_row_, columns, false);
            rows_of_product(d_numerator, i, rows, steps<Element>(value_dim_), value_transposed_, chunk_row_,
                            d_scores_, chunk_row_, columns, false);
            for (int m = i; m < seen; ++m) {
                this->mask_scores(scores_ + m * chunk_row_, m, columns);
                if (this->ROUNDED && p_.normalise) scale(scores_ + m * chunk_row_, this->inverse(m), columns);
                add_t_and_mask(m, columns);
            }
            if (S) {
                rows_of_product(d_numerator, i, rows, steps<Element>(value_dim_), S, key_row_, d_query_,
                                key_row_, key_row_, false);
                for (int m = i; m < seen; ++m) {
                    float* row = d_query_ + m * key_row_;
                    const float factor = decay_.pairwise ? decay_.query[m] : 1;
                    const float inverse = this->inverse(m), t = t_[m];
                    for (int d = 0; d < key_row_; d += WIDTH)
                        store(row + d, (load(row + d) * inverse + load(z + d) * t) * factor);
                }
            }
            const Factor<Element> d_scores =
                along_rows(d_scores_ + i * chunk_row_, chunk_row_, rows, columns, d_score_rows_);
            rows_of_product(d_scores, 0, rows, steps<Element>(seen), keys, key_row_, d_query_ + i * key_row_,
                            key_row_, key_row_, S);
            write_query_gradients(head, start, i, rows);
        }
        const int row = chunk_row_, columns = padded(count);
        const Element* scores_across = across_rows(scores_, row, count, columns, score_columns_);
        const Element* d_scores_across = across_rows(d_scores_, row, count, columns, d_score_columns_);
        for (int j = 0; j < count; j += STRIP<Element>) {  // the queries from this key on
            const int rows = std::min(STRIP<Element>, count - j), first = j / STEPS<Element>;
            const int inner = steps<Element>(count) - first;
            const Factor<Element> scores{scores_across + first * row, 1, row};
            const Factor<Element> d_scores{d_scores_across + first * row, 1, row};
            rows_of_product(scores, j, rows, inner, g_across + first * value_row_, value_row_, d_value_,
                            value_row_, value_row_, true);
            rows_of_product(d_scores, j, rows, inner, queries_across + first * key_row_, key_row_, d_key_,
                            key_row_, key_row_, true);
        }
        if (start == 0 && !p_.S) return;  // nothing comes before
        if (decay_.pairwise)
            for (int i = 0; i < count; ++i) scale(query_ + i * key_row_, decay_.query[i], key_row_);
        this->add_to_state_gradient(count, g_across);
    }

    void add_t_and_mask(int row, int columns) const {
        float* d_scores = d_scores_ + row * chunk_row_;
        const float factor = this->inverse(row), t = t_[row];
        for (int j = 0; j < columns; j += WIDTH) store(d_scores + j, load(d_scores + j) * factor + t);
        this->mask_scores(d_scores, row, columns);
    }
};
